"""Costs without the machine: simulated, or from one device in the place of one rank."""
