"""Benchmarks: each prints one JSON object; see docs/benchmarks.md."""
