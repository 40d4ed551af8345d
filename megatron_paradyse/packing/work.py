"""What attention on a packed microbatch takes: scores per rank, and tokens that ranks exchange."""

from __future__ import annotations

from megatron_paradyse.packing.row import Row


def scores_per_rank(row: Row, *, causal: bool) -> list[int]:
    """Unmasked scores, per head, of the queries that each rank holds: work where keys come to them.

    Strategies that split heads (megatron_ts, ulysses_z) give every rank the mean of these.
    """
    return [
        sum(
            scores_between(row.lengths[number], start, stop, causal) for number, start, stop in held
        )
        for held in row.pieces
    ]


def scores_between(length: int, start: int, stop: int, causal: bool) -> int:
    """Unmasked scores of the queries [start, stop) of a document."""
    if not causal:
        return (stop - start) * length
    return (stop * (stop + 1) - start * (start + 1)) // 2


def imbalance(row: Row, *, causal: bool) -> float:
    """Scores of the fullest rank over the mean: 1 is even."""
    scores = scores_per_rank(row, causal=causal)
    return max(scores) * len(scores) / max(sum(scores), 1)


def keys_received(row: Row, *, causal: bool = False) -> list[int]:
    """Per rank the tokens whose keys and values other ranks hold and its queries see.

    What a ring moves that sends keys to ranks whose queries see them, and to no others. causal:
    queries see no later key; else all of their document.
    """
    return [sum(column) for column in zip(*keys_moved(row, causal=causal), strict=True)]


def keys_moved(row: Row, *, causal: bool = False) -> list[list[int]]:
    """[p][p]: the tokens whose keys and values rank i sends to rank j."""
    moved = [[0] * row.p for _ in range(row.p)]
    holders: dict[int, dict[int, list[tuple[int, int]]]] = {}  # of a document, by rank
    for rank, pieces in enumerate(row.pieces):
        for number, start, stop in pieces:
            holders.setdefault(number, {}).setdefault(rank, []).append((start, stop))
    for by_rank in holders.values():
        for receiver, queries in by_rank.items():
            last = max(stop for _, stop in queries)
            for sender, keys in by_rank.items():
                if sender != receiver:
                    moved[sender][receiver] += sum(
                        stop - start for start, stop in keys if start < last or not causal
                    )
    return moved
