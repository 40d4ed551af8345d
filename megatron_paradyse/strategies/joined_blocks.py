"""Blocks of packed documents: neighbours as one call, and which have nothing to be merged with."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from megatron_paradyse.strategies.blocks import Block


@lru_cache(maxsize=1024)
def join_documents(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Each run of blocks in which both queries and keys follow those of the block before, joined.

    Such a block's parts say the rows of queries and keys of each. Of documents that lie whole on
    a rank without gaps, one is left.
    """
    joined: list[Block] = []
    runs: list[list[tuple[int, int]]] = []
    open_ends: dict[tuple, int] = {}  # where in `joined` a block ends that may go on
    for block in sorted(blocks, key=lambda block: (block.sequences, block.q_rows)):
        index = open_ends.pop(_end(block, 0), None)
        if index is None:
            index = len(joined)
            joined.append(block)
            runs.append([_size(block)])
        else:
            q_rows = joined[index].q_rows[0], block.q_rows[1]
            k_rows = joined[index].k_rows[0], block.k_rows[1]
            joined[index] = replace(joined[index], q_rows=q_rows, k_rows=k_rows)
            runs[index].append(_size(block))
        if block.window is None and block.sequences[1] - block.sequences[0] == 1:
            open_ends[_end(block, 1)] = index
    return tuple(
        replace(block, parts=tuple(run)) if len(run) > 1 else block
        for block, run in zip(joined, runs, strict=True)
    )


def _end(block: Block, side: int) -> tuple:
    """Where a block begins (0) or ends (1), and what those that join must have in common."""
    rows = block.q_rows[side], block.k_rows[side]
    return block.sequences, block.causal, block.window, *rows


def _size(block: Block) -> tuple[int, int]:
    return block.q_rows[1] - block.q_rows[0], block.k_rows[1] - block.k_rows[0]


@lru_cache(maxsize=1024)
def share_no_rows(blocks: tuple[Block, ...]) -> bool:
    """Whether no two blocks have a query in common, nor a key: their gradients are no sums."""
    for rows in ("q_rows", "k_rows"):
        ranges = sorted((block.sequences, getattr(block, rows)) for block in blocks)
        for (sequences, (_, stop)), (others, (start, _)) in pairwise(ranges):
            if sequences[1] > others[0] and (sequences != others or stop > start):
                return False
    return True


def first_of_their_queries(blocks: Sequence[Block]) -> list[bool]:
    """Of each block, whether none before it has any of its queries: there is nothing to merge.

    Of documents that lie on one rank in one piece, every block.
    """
    first: list[bool] = []
    starts: list[int] = []  # of disjoint ranges of rows, ascending, and their stops
    stops: list[int] = []
    for block in blocks:
        start, stop = block.q_rows
        i, j = bisect_right(stops, start), bisect_left(starts, stop)
        first.append(i == j)
        if i < j:
            start, stop = min(start, starts[i]), max(stop, stops[j - 1])
        starts[i:j], stops[i:j] = [start], [stop]
    return first
