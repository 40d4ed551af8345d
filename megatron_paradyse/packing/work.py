"""What attention on a packed microbatch takes: scores per rank, and tokens that ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_paradyse.packing.row import Row
from megatron_paradyse.strategies.row_sizes import Moments


def scores_per_rank(row: Row, *, causal: bool, window: int | None = None) -> list[int]:
    """Unmasked scores, per head, of the queries that each rank holds: work where keys come to them.

    Strategies that split heads (megatron_ts, ulysses_z) give every rank the mean of these.
    """
    return [
        sum(
            scores_between(row.lengths[number], start, stop, causal, window)
            for number, start, stop in held
        )
        for held in row.pieces
    ]


def scores_between(
    length: int, start: int, stop: int, causal: bool, window: int | None = None
) -> int:
    """Unmasked scores of the queries [start, stop) of a document.

    window: how many keys a causal query sees at most, its own among them.
    """
    if not causal:
        return (stop - start) * length
    if window is None or stop <= window:
        return (stop * (stop + 1) - start * (start + 1)) // 2
    return scores_up_to(stop, window) - scores_up_to(start, window)


def scores_up_to(stop: int, window: int) -> int:
    """Unmasked causal scores of the first queries of a document."""
    near = min(stop, window)  # queries that see all keys before them
    return near * (near + 1) // 2 + (stop - near) * window


def imbalance(row: Row, *, causal: bool, window: int | None = None) -> float:
    """Scores of the fullest rank over the mean: 1 is even."""
    scores = scores_per_rank(row, causal=causal, window=window)
    return max(scores) * len(scores) / max(sum(scores), 1)


def keys_received(row: Row, *, causal: bool = False, window: int | None = None) -> list[int]:
    """Per rank the tokens whose keys and values other ranks hold and its queries see.

    What a ring moves that sends keys to ranks whose queries see them, and to no others. causal:
    queries see no later key; else all of their document. window: as in scores_between.
    """
    moved = keys_moved(row, causal=causal, window=window)
    return [sum(column) for column in zip(*moved, strict=True)]


def keys_moved(row: Row, *, causal: bool = False, window: int | None = None) -> list[list[int]]:
    """[p][p]: the tokens whose keys and values rank i sends to rank j."""
    moved = [[0] * row.p for _ in range(row.p)]
    holders: dict[int, dict[int, list[tuple[int, int]]]] = {}  # of a document, by rank
    for rank, pieces in enumerate(row.pieces):
        for number, start, stop in pieces:
            holders.setdefault(number, {}).setdefault(rank, []).append((start, stop))
    for by_rank in holders.values():
        for receiver, queries in by_rank.items():
            for sender, keys in by_rank.items():
                if sender != receiver:
                    moved[sender][receiver] += sum(
                        _keys_seen(start, stop, queries, window) if causal else stop - start
                        for start, stop in keys
                    )
    return moved


def keys_at_once(row: Row, *, causal: bool = False, window: int | None = None) -> list[int]:
    """Per rank, most tokens of keys, or of their gradients, that are there in a step."""
    received = list(zip(*keys_moved(row, causal=causal, window=window), strict=True))
    return [of_rank.keys_at_once for of_rank in moments(received, row.seq_length // row.p)]


def moments(received: Sequence[Sequence[int]], rows: int) -> list[Moments]:
    """Per rank the most in a step of an exchange, of [p][p] tokens: rank i gets those of rank j.

    Rank r uses what came of the step before while that of rank r - i comes and that of rank r + i
    is sent. In the backward gradients of the last are made while those of the step before go
    back, and others come for what was sent in it. rows: of a rank, which are sent as they lie, not
    copied, if all of them are.
    """
    p, found = len(received), []
    for r, into in enumerate(received):
        comes, goes = into[r - 1], received[r + 1 - p][r]
        first, most = comes + (goes if goes < rows else 0), comes + goes
        in_use = made = sent = before = 0
        for i in range(2, p + 1):
            used, went = comes, goes
            comes, goes = (into[r - i], received[r + i - p][r]) if i < p else (0, 0)
            keys = used + comes
            now = keys + (goes if goes > went else went)
            if now > most:
                most = now
            keys += goes if goes < rows else 0
            if keys > in_use:
                in_use = keys
            if used + before > made:
                made = used + before
            before = used + went
            if before > sent:
                sent = before
        found.append(Moments(first, in_use, made, sent, most))
    return found


def _keys_seen(start: int, stop: int, queries: list[tuple[int, int]], window: int | None) -> int:
    """Of the keys [start, stop) those that causal queries elsewhere see; the next see most."""
    following = [first for first, _ in queries if first >= stop]
    if not following:
        return 0
    reach = stop - start if window is None else window - 1 - (min(following) - stop)
    return max(0, min(stop - start, reach))
