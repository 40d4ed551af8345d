"""Which tokens of a data set are learnt: those that a prompt or a user gave are read only.

On the disk PREFIX.targets has one byte for each token of PREFIX.bin, in the same order: 1 where the
token is learnt, 0 where it is not. Without that file all are.

In a sample a token that is not learnt stands as its complement, ~token, which is negative: one
array says both. What is learnt is the prediction of a token from those before it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from megatron_paradyse.data.tokenizers import TokenArray
from megatron_paradyse.errors import UserError

SUFFIX = ".targets"
TargetArray = np.ndarray[Any, np.dtype[np.uint8]]


def has_targets(prefix: str) -> bool:
    return os.path.exists(prefix + SUFFIX)


def map_targets(prefix: str, num_tokens: int) -> TargetArray | None:
    """PREFIX.targets, mapped into memory, of num_tokens tokens; None where there is none.

    Raises UserError where it has another size.
    """
    if not has_targets(prefix):
        return None
    size = os.path.getsize(prefix + SUFFIX)
    if size != num_tokens:
        raise UserError(
            f"{prefix}.targets has {size:,} bytes, and {prefix}.bin {num_tokens:,} tokens: one of "
            "them was cut off or replaced: prepare the data again"
        )
    return np.memmap(prefix + SUFFIX, dtype=np.uint8, mode="r")


def marked(tokens: TokenArray, targets: TargetArray) -> TokenArray:
    """int64 tokens, complements where they are not learnt."""
    tokens = tokens.astype(np.int64)
    return np.where(targets != 0, tokens, ~tokens)


def ids_of(marked: TokenArray) -> TokenArray:
    """The tokens, whether learnt or not."""
    return np.where(marked < 0, ~marked, marked)


def count_within(targets: TargetArray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """How many tokens are learnt in each of n ranges [start, stop), none empty; int64 [n]."""
    edges = np.stack([starts, stops], 1).reshape(-1)
    if len(edges) and edges[-1] == len(targets):
        edges = edges[:-1]
    return np.add.reduceat(targets != 0, edges, dtype=np.int64)[::2] if len(edges) else edges
