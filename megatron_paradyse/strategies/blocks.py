"""Which rectangles of the score matrix hold anything: the one place that knows the mask.

Queries and keys come as contiguous ranges of global positions that are either the same range or
disjoint (chunks of a sequence). Cut at document edges, each rectangle is then empty, full, or the
square on the diagonal: never a general mask. A sliding window adds a band to some of them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any

from megatron_paradyse.strategies.contract import AttentionShape, Microbatch
from megatron_paradyse.strategies.sizes import is_narrow

Documents = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Span:
    """Contiguous rows of a rank's chunk: from `row` on they are positions [start, stop)."""

    row: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Block:
    """A rectangle of scores: sequences x queries x keys, with nothing masked but what is said.

    Queries and keys are ranges of rows of the rank's chunks; q_start and k_start are the global
    positions of the first of each. Only where positions matter (window, dropout) are they sure to
    be contiguous: plan_blocks merges others by their rows.
    """

    sequences: tuple[int, int]
    q_rows: tuple[int, int]
    k_rows: tuple[int, int]
    q_start: int
    k_start: int
    causal: bool  # the square on the diagonal: a query sees the keys up to its own position
    window: int | None  # keys further back than window - 1 are hidden; None: no key here is
    parts: tuple[tuple[int, int], ...] = ()  # many blocks side by side: rows of queries and keys

    @property
    def num_scores(self) -> int:
        """Scores that are not masked, per head."""
        assert not self.parts
        rows = self.q_rows[1] - self.q_rows[0]
        columns = self.k_rows[1] - self.k_rows[0]
        sequences = self.sequences[1] - self.sequences[0]
        ahead = self.q_start - self.k_start
        visible = num_visible(rows, columns, ahead=ahead, causal=self.causal, window=self.window)
        return sequences * visible


def num_visible(rows: int, columns: int, *, ahead: int, causal: bool, window: int | None) -> int:
    """The scores of a rectangle that its masks leave, of one head.

    ahead: the position of the first query less that of the first key; 0 where causal, of a square.
    """
    if causal:
        short = rows if window is None else min(rows, window)
        return short * (short + 1) // 2 + (rows - short) * short
    if window is None:
        return rows * columns

    def hidden_before(count: int) -> int:
        """The sum of min(max(i, 0), columns) over i < count: query i of those hides so many."""
        some = min(max(count, 0), columns)
        return some * (some - 1) // 2 + max(count - columns, 0) * columns

    first = ahead - window + 1  # of the keys, that the first query no longer sees
    return rows * columns - (hidden_before(first + rows) - hidden_before(first))


def whole(microbatch: Microbatch) -> tuple[Span, ...]:
    """The spans of a rank that holds every position of its group, in their order (order.py)."""
    if microbatch.wide is None:
        return (Span(0, 0, microbatch.seq_length),)
    return group_spans(microbatch, microbatch.wide.peers.rank())


def group_spans(microbatch: Microbatch, index: int) -> tuple[Span, ...]:
    """The same of one of the groups that share a wide microbatch."""
    shards = microbatch.shards_of_group(index)
    assert shards is not None
    return spans_of_ranges(sorted(itertools.chain.from_iterable(shards)))


def contiguous_spans(microbatch: Microbatch, p: int, rank: int) -> tuple[Span, ...]:
    """The spans of `rank` in the resident layout: the rank-th contiguous chunk, or its shard."""
    if microbatch.shards is not None:
        assert len(microbatch.shards) == p, "a shard for each rank"
        return spans_of_ranges(microbatch.shards[rank])
    size = microbatch.seq_length // p
    return (Span(0, rank * size, (rank + 1) * size),)


def spans_of_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[Span, ...]:
    """The spans of rows that hold these ranges of positions one after the other."""
    spans: list[Span] = []
    row = 0
    for start, stop in ranges:
        if spans and spans[-1].stop == start:
            spans[-1] = replace(spans[-1], stop=stop)
        else:
            spans.append(Span(row, start, stop))
        row += stop - start
    return tuple(spans)


def balanced_spans(microbatch: Microbatch, p: int, rank: int) -> tuple[Span, ...]:
    """The spans of `rank` after swap_halves: first half of chunk r, second half of chunk p-1-r.

    Causal work grows linearly with the position, and the two halves' positions sum to the same on
    every rank. They lie in ascending order, so that a rank's rows among themselves are one causal
    square (plan_blocks). Any chunk size will do: the first half takes the odd row. A rank that is
    its own mirror holds its whole chunk. A microbatch with shards was balanced when these were
    chosen: nothing is swapped.
    """
    if microbatch.shards is not None or rank == p - 1 - rank:
        return contiguous_spans(microbatch, p, rank)
    size = microbatch.seq_length // p
    half = (size + 1) // 2
    first, second = rank * size, (p - 1 - rank) * size
    halves = ((first, first + half), (second + half, second + size))
    return spans_of_ranges(sorted((start, stop) for start, stop in halves if start < stop))


def sends_what_is_seen(shape: AttentionShape, microbatch: Microbatch, p: int) -> bool:
    """Whether keys go straight to the ranks whose queries see them (routes.py): of packed
    documents, and of sequences of which a narrow window leaves little. Else all go round a ring.
    """
    return microbatch.shards is not None or is_narrow(shape.window, microbatch.seq_length, p)


def swaps_halves(shape: AttentionShape, microbatch: Microbatch, p: int) -> bool:
    """Whether a ring's chunks are those of balanced_spans, because causal work is uneven."""
    return shape.causal and not sends_what_is_seen(shape, microbatch, p)


def ring_spans(
    shape: AttentionShape, microbatch: Microbatch, p: int
) -> tuple[tuple[Span, ...], ...]:
    """The spans of each rank's chunk in a ring attention."""
    spans_of = balanced_spans if swaps_halves(shape, microbatch, p) else contiguous_spans
    return tuple(spans_of(microbatch, p, rank) for rank in range(p))


@lru_cache(maxsize=4096)
def plan_blocks(
    q_spans: tuple[Span, ...],
    k_spans: tuple[Span, ...],
    documents: Documents | None,
    batch_size: int,
    causal: bool,
    window: int | None,
    merge: bool = False,
) -> tuple[Block, ...]:
    """The rectangles of q_spans x k_spans that are not empty, each full, diagonal or banded.

    merge: those that are neighbours by their rows become one, so that fewer kernels run: squares on
    the diagonal with all that is below it between them, and full ones. At every step of a balanced
    causal ring one is left.
    """
    blocks: list[Block] = []
    for sequences, ranges in _sequences_alike(documents, batch_size):
        for q, k in _pairs(q_spans, k_spans, ranges):
            blocks += _blocks(sequences, q, k, causal, window)
    if merge and window is None:
        blocks = _merged(_merged(_one_diagonal(blocks), across="k_rows"), across="q_rows")
    return tuple(blocks)


def blocks_of(
    q_spans: tuple[Span, ...],
    k_spans: tuple[Span, ...],
    shape: AttentionShape,
    microbatch: Microbatch,
) -> tuple[Block, ...]:
    """plan_blocks with the mask of a layer and a microbatch."""
    return plan_blocks(
        q_spans,
        k_spans,
        microbatch.documents,
        microbatch.batch_size,
        shape.causal,
        shape.window,
        merge=shape.dropout == 0.0,
    )


def _one_diagonal(blocks: list[Block]) -> list[Block]:
    """Squares on the diagonal that follow each other, and the rectangles between them, join.

    Their rows ascend with their positions, so that each query sees the keys up to its own row.
    """
    squares = sorted((b for b in blocks if b.causal), key=attrgetter("sequences", "q_rows"))
    below = {(b.sequences, b.q_rows, b.k_rows): b for b in blocks if not b.causal}
    runs: list[list[Block]] = []
    for square in squares:
        run = runs[-1] if runs else []
        between = [(square.sequences, square.q_rows, earlier.k_rows) for earlier in run]
        follows = run and (run[-1].q_rows[1], run[-1].k_rows[1]) == (
            square.q_rows[0],
            square.k_rows[0],
        )
        if follows and all(key in below for key in between):
            for key in between:
                del below[key]
            run.append(square)
        else:
            runs.append([square])
    joined = [
        replace(
            run[0],
            q_rows=(run[0].q_rows[0], run[-1].q_rows[1]),
            k_rows=(run[0].k_rows[0], run[-1].k_rows[1]),
        )
        for run in runs
    ]
    return joined + list(below.values())


def _merged(blocks: list[Block], *, across: str) -> list[Block]:
    """Full blocks that touch in these rows, "q_rows" or "k_rows", and agree in the others, join."""
    along = "q_rows" if across == "k_rows" else "k_rows"
    merged: list[Block] = []
    open_ends: dict[tuple, int] = {}  # where in `merged` a full block ends that may go on
    for block in sorted(blocks, key=attrgetter(across)):
        key = (block.sequences, getattr(block, along))
        start, stop = getattr(block, across)
        index = None if block.causal else open_ends.pop((key, start), None)
        if index is None:
            index = len(merged)
            merged.append(block)
        else:
            first, _ = getattr(merged[index], across)
            joined: dict[str, Any] = {across: (first, stop)}
            merged[index] = replace(merged[index], **joined)
        if not block.causal:
            open_ends[key, stop] = index
    return merged


def _sequences_alike(documents: Documents | None, batch_size: int):
    """Runs of neighbouring sequences with the same documents, as ((first, stop), documents)."""
    if documents is None:
        yield (0, batch_size), None
        return
    first = 0
    for ranges, run in groupby(documents):
        stop = first + len(list(run))
        yield (first, stop), ranges
        first = stop


def _pairs(
    q_spans: tuple[Span, ...], k_spans: tuple[Span, ...], ranges: Sequence[tuple[int, int]] | None
) -> Iterator[tuple[Span, Span]]:
    """The pairs of spans; with documents, of their parts that lie in the same one."""
    if ranges is None:
        yield from itertools.product(q_spans, k_spans)
        return
    queries, keys = _by_document(q_spans, ranges), _by_document(k_spans, ranges)
    for number in sorted(queries.keys() & keys.keys()):
        yield from itertools.product(queries[number], keys[number])


def _by_document(
    spans: tuple[Span, ...], ranges: Sequence[tuple[int, int]]
) -> dict[int, list[Span]]:
    """The parts of the spans that lie in each document."""
    parts: dict[int, list[Span]] = {}
    stops = [stop for _, stop in ranges]
    for span in spans:
        for number in range(bisect_right(stops, span.start), len(ranges)):
            start, stop = ranges[number]
            if start >= span.stop:
                break
            if start < stop:
                parts.setdefault(number, []).append(_part(span, start, stop))
    return parts


def _part(span: Span, start: int, stop: int) -> Span:
    start, stop = max(start, span.start), min(stop, span.stop)
    return Span(span.row + start - span.start, start, max(start, stop))


def _blocks(
    sequences: tuple[int, int], q: Span, k: Span, causal: bool, window: int | None
) -> Iterator[Block]:
    """One, none where all is masked, or two: of a banded one with more queries than keys, the first
    ones see every key. They are a block of their own, as kernels cannot be told of a bound for
    keys that are too old without one for keys that are ahead (kernels.py).
    """
    same = (q.start, q.stop) == (k.start, k.stop)
    assert same or q.stop <= k.start or k.stop <= q.start, f"spans overlap in part: {q}, {k}"
    if causal and k.start > q.start:
        return
    if window is not None:
        # Every row left sees the last key, every key left is seen by the first row.
        q, k = _part(q, q.start, k.stop - 1 + window), _part(k, q.start - window + 1, k.stop)
        if not len(q):
            return  # even the nearest pair is too far apart
        if (q.stop - 1) - k.start < window:
            window = None  # even the farthest pair is near enough
        elif len(q) > len(k):
            # Each row hides one key more than the one before it, and the last one sees a key.
            border = q.stop - len(k)
            yield _rectangle(sequences, _part(q, q.start, border), k)
            q = _part(q, border, q.stop)
    yield _rectangle(sequences, q, k, causal=causal and same, window=window)


def _rectangle(
    sequences: tuple[int, int], q: Span, k: Span, causal: bool = False, window: int | None = None
) -> Block:
    return Block(
        sequences=sequences,
        q_rows=(q.row, q.row + len(q)),
        k_rows=(k.row, k.row + len(k)),
        q_start=q.start,
        k_start=k.start,
        causal=causal,
        window=window,
    )
