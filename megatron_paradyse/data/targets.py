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
NO_LABEL = -1  # where nothing is predicted
BLOCK_BYTES = 1 << 22  # counted at a time
TargetArray = np.ndarray[Any, np.dtype[np.uint8]]


def has_targets(prefix: str) -> bool:
    """Also where it is a link to nothing, which is no data set that learns all."""
    return os.path.lexists(prefix + SUFFIX)


def map_targets(prefix: str, num_tokens: int) -> TargetArray | None:
    """PREFIX.targets, mapped into memory, of num_tokens tokens; None where there is none.

    Raises UserError where it cannot be read, or has another size.
    """
    if not has_targets(prefix):
        return None
    try:
        with open(prefix + SUFFIX, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise UserError(
            f"{prefix}.targets cannot be read ({error.strerror}): copy it there again, or remove "
            "it to learn every token"
        ) from error
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


def count_within(
    targets: TargetArray, starts: np.ndarray, stops: np.ndarray, *, prefix: str = ""
) -> np.ndarray:
    """How many tokens are learnt in each of n ranges [start, stop), both ascending; int64 [n].

    Reads a block at a time: the file may be larger than the memory. Raises UserError for a byte
    that is neither 0 nor 1.
    """
    both = (starts, stops)
    before = [np.zeros(len(edges), dtype=np.int64) for edges in both]
    ends, total = [0, 0], 0
    for first in range(0, len(targets), BLOCK_BYTES):
        block = targets[first : first + BLOCK_BYTES]
        _check_values(block, first, prefix)
        counts = np.cumsum(block, dtype=np.int32)
        for i, edges in enumerate(both):
            begin, ends[i] = np.searchsorted(edges, [first, first + len(block)])
            places = edges[begin : ends[i]] - first
            before[i][begin : ends[i]] = total + counts[places] - block[places]
        total += int(counts[-1])
    for counted, end in zip(before, ends, strict=True):
        counted[end:] = total  # at the end of the file
    return before[1] - before[0]


def _check_values(block: TargetArray, first: int, prefix: str) -> None:
    if block.max() > 1:
        place = int((block > 1).argmax())
        raise UserError(
            f"{prefix}.targets has the value {block[place]} for token {first + place:,}: write "
            "bytes of 1, learnt, and 0, not learnt, or prepare the data again"
        )
