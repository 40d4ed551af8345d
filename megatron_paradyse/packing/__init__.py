"""Many documents in one sequence, each on no more ranks than it needs."""
