"""Rows for tests."""

from __future__ import annotations

import random

from megatron_paradyse.packing.row import Row, contiguous


def zigzag(lengths, p: int) -> Row:
    """Rank r holds the r-th and the (2p-1-r)-th of 2p chunks: one document is spread evenly."""
    row = contiguous(lengths, p, alignment=2 * p)
    half = row.seq_length // (2 * p)
    chunks = [(i * half, (i + 1) * half) for i in range(2 * p)]
    return Row(row.lengths, tuple((chunks[r], chunks[-1 - r]) for r in range(p)))


def random_row(rng: random.Random, p: int, *, longest: int = 40, most: int = 20) -> Row:
    lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, most))]
    return zigzag(lengths, p) if rng.random() < 0.5 else contiguous(lengths, p, alignment=2 * p)
