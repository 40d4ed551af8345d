"""Which attention probabilities dropout drops: a pure function of global indices.

Every strategy, group size and recomputation cuts the score matrix differently; a hash of the global
position of an entry makes all of them, and the reference, drop the same ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
# Multipliers of the 32-bit "lowbias32" mixer (C. Wellons, hash-prospector). The second is written
# less 2^32: the same modulo 2^32, and the product of a 32-bit value with it fits in an int64.
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - (1 << 32)
FIRST_KEY = 0x9E3779B9  # c below: any number far beyond positions


def _mix(x):
    """Scramble 32-bit values (an int, or an int64 tensor of values in [0, 2^32)), bijectively."""
    x = x ^ (x >> 16)
    x = (x * _MULTIPLIER_1) & _MASK
    x = x ^ (x >> 15)
    x = (x * _MULTIPLIER_2) & _MASK
    return x ^ (x >> 16)


def row_base(seed: int) -> int:
    """What the hashes of all rows begin with: 32 bits."""
    return _mix((_mix(seed & _MASK) + (seed >> 32)) & _MASK)


def keep_mask(
    seed: int, *, sequences: Tensor, heads: Tensor, queries: Tensor, keys: Tensor, dropout: float
) -> Tensor:
    """True where attention dropout keeps the entry: [sequences, heads, queries, keys], bool.

    The four 1-d int64 tensors hold global indices. With m = mix:

        row   = m(m(m(m(m(seed low) + seed high) + sequence) + head) + query)
        kept  = m(row ^ m(key + c)) >= dropout 2^32

    so that the bulk costs one mix per entry, and a probability is kept with chance 1 - dropout.
    Where row is m(query), for m(0) = 0, c keeps the keys' hashes from being the queries' ones.
    """
    row = _mix((sequences[:, None, None] + row_base(seed)) & _MASK)
    for index in (heads[:, None], queries):
        row = _mix((row + index) & _MASK)
    entry = _mix(row[..., None] ^ _mix((keys + FIRST_KEY) & _MASK))
    return entry >= int(dropout * (_MASK + 1))


def keep_mask_of_ranges(
    seed: int,
    *,
    sequences: range,
    heads: range,
    queries: range,
    keys: range,
    dropout: float,
    device: torch.device,
) -> Tensor:
    """keep_mask of four contiguous ranges of indices."""
    indices = [
        torch.arange(r.start, r.stop, device=device) for r in (sequences, heads, queries, keys)
    ]
    names = ("sequences", "heads", "queries", "keys")
    return keep_mask(seed, dropout=dropout, **dict(zip(names, indices, strict=True)))
