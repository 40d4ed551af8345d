"""Megatron-LM on sequences of very different lengths: a strategy per layer and microbatch."""

__version__ = "0.1.0"
