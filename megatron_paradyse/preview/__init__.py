"""What training would choose, told beforehand from a cost file. No torch.

setup      the policy as training makes it, from the options of the commands
forecast   the plan of one length, and the plans that lost against it
peak_parts what a plan's peak consists of
longest    the longest sequence that each strategy and ParaDySe can train
commands   megatron-paradyse plan and max-length; plan_text, explain, longest_text, longest_figure
"""
