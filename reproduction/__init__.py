"""The paper's results again, one command each: simulated at its scale, measured at this machine's.

Nothing in megatron_paradyse imports this package.
"""
