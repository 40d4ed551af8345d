"""How ParaDySe enters Megatron's training: flags, data, hook, log."""
