"""What each strategy costs: measured tables, fitted models, the file that holds both.

Numbers only: nothing here imports torch, and xgboost or matplotlib are imported by what fits a
forest or draws a figure. Start with table.py; docs/cost-model.md explains the models.
"""
