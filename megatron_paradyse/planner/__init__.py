"""Which strategy each layer of a microbatch runs: from costs, and a memory budget. No torch."""
