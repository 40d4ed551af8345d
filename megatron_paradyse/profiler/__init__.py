"""Measures what each strategy costs on this machine; commands.py is the way in."""
