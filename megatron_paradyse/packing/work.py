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


def keys_received(row: Row) -> list[int]:
    """Per rank the tokens whose keys and values other ranks hold and its queries may see.

    A ring that sends a document's keys to the ranks that hold some of it, and to no others.
    """
    held: list[dict[int, int]] = []
    for pieces in row.pieces:
        tokens: dict[int, int] = {}
        for number, start, stop in pieces:
            tokens[number] = tokens.get(number, 0) + stop - start
        held.append(tokens)
    return [sum(row.lengths[n] - mine for n, mine in tokens.items()) for tokens in held]
