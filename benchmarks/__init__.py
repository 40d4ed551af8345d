"""Benchmarks: each prints one JSON object; `megatron-paradyse bench` lists and runs them."""
