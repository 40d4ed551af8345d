"""Rows for tests."""

from __future__ import annotations

import random

from megatron_paradyse.packing.row import Row, contiguous

# Of four ranks: a document in eight pieces, one in two, the others whole; padding on three ranks.
SPREAD = Row(
    (16, 6, 3, 1, 2),
    (
        ((0, 2), (14, 16), (16, 19), (25, 26)),
        ((2, 4), (12, 14), (19, 22), (28, 29)),
        ((4, 6), (10, 12), (26, 28), (29, 31)),
        ((6, 8), (8, 10), (22, 25), (31, 32)),
    ),
)


def zigzag(lengths, p: int) -> Row:
    """Rank r holds the r-th and the (2p-1-r)-th of 2p chunks: one document is spread evenly."""
    row = contiguous(lengths, p, alignment=2 * p)
    half = row.seq_length // (2 * p)
    chunks = [(i * half, (i + 1) * half) for i in range(2 * p)]
    return Row(row.lengths, tuple((chunks[r], chunks[-1 - r]) for r in range(p)))


def random_row(rng: random.Random, p: int, *, longest: int = 40, most: int = 20) -> Row:
    lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, most))]
    return zigzag(lengths, p) if rng.random() < 0.5 else contiguous(lengths, p, alignment=2 * p)


def keys_needed(row, rank, *, causal, window=1 << 40):
    """Tokens that the rank does not hold and its queries see, one by one."""
    mine = {(n, i) for n, start, stop in row.pieces[rank] for i in range(start, stop)}
    seen = {
        (n, key)
        for n, query in mine
        for key in range(max(0, query - window + 1), query + 1 if causal else row.lengths[n])
    }
    return seen - mine
