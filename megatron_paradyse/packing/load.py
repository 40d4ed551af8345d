"""What the costs of a packed microbatch depend on: a few numbers of its row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from megatron_paradyse.packing.exchange import Exchange, Pieces, largest_call, pieces_by_rank
from megatron_paradyse.packing.row import Row, aligned, contiguous
from megatron_paradyse.packing.work import scores_between, scores_up_to
from megatron_paradyse.strategies.row_sizes import RowSizes
from megatron_paradyse.strategies.sizes import is_narrow

STEPS_PER_DOUBLING = 16


@dataclass(frozen=True, slots=True)
class Load:
    """A row's tokens, attention work and exchange; scores are per head.

    seq_length: s, padding included; of a wide row, as scores, what its fullest group has, and p the
    ranks of a group. scores: unmasked, of all ranks together; fullest_scores: of the
    queries that the rank with the most of them holds. keys_received: tokens whose keys and values
    the rank with the most of them needs of others, for its queries see them. documents: how many
    there are; fullest_documents: of how many the rank with the most of them holds tokens. in_order:
    whether the rows of each group's ranks, one rank after the other, are in the order of positions.
    peers: the ranks with which the one that has the most of them shares documents. groups:
    Row.groups; group_keys: of a wide row, tokens whose keys and values come to the group with the
    most of them. buffers: what bytes follow from besides; None: not known, as in files of earlier
    versions.
    within: of a model with a sliding window, the same for layers that have it: the scores, keys and
    buffers that it leaves, and as peers the ranks that keys come from or go to. None: no window.
    """

    seq_length: int
    p: int
    scores: int
    fullest_scores: int
    keys_received: int
    documents: int
    fullest_documents: int
    peers: int
    in_order: bool = True
    groups: int = 1
    group_keys: int = 0
    buffers: RowSizes | None = None
    within: Load | None = None

    @property
    def crosses(self) -> bool:
        """Whether any document lies on more than one rank."""
        return self.keys_received > 0

    def seen(self, windowed: bool) -> Load:
        """By a layer with the window, or by one without."""
        if not windowed:
            return self
        assert self.within is not None, "loads of a model with a window tell what it leaves"
        return self.within


def load_of(row: Row, *, causal: bool, window: int | None = None) -> Load:
    """packing/work.py says the same rank by rank. window: keys that a causal query sees."""
    load = _load_of(row, causal, None)
    if window is None:
        return load
    within = _load_of(row, True, window)
    assert load.buffers is not None and within.buffers is not None
    buffers = replace(within.buffers, longest=load.buffers.longest)
    return replace(load, within=replace(within, buffers=buffers))


def _load_of(row: Row, causal: bool, within: int | None) -> Load:
    """One walk over documents and ranges. within: a window, or none."""
    window = row.seq_length if within is None else within
    scores, missing, documents, num_pieces = ([0] * row.p for _ in range(4))
    exchange = Exchange(row.p)
    rows = row.seq_length // row.p
    piece, piece_beside, most_held = 0, 0, 0
    sizes: list[list[int]] = [[] for _ in range(row.p)]  # of blocks, by rank
    for length, pieces in _documents(row):
        if len(pieces) == 1:  # whole on a rank
            rank = pieces[0][0]
            scores[rank] += scores_between(length, 0, length, causal, window)
            documents[rank] += 1
            num_pieces[rank] += 1
            sizes[rank].append(length)
            if length > piece:
                piece = length
            if length > most_held and within is None:
                most_held = length
            if piece_beside < length < rows:
                piece_beside = length
            continue
        held: dict[int, int] = {}  # by rank: up to where
        tokens: dict[int, int] = {}
        for rank, start, stop in pieces:
            size = stop - start
            scores[rank] += scores_between(length, start, stop, causal, window)
            before = start - held.get(rank, 0)
            missing[rank] += before if before < window else window - 1
            held[rank] = stop
            tokens[rank] = tokens.get(rank, 0) + size
            num_pieces[rank] += 1
            if within is not None:
                sizes[rank].append(size)
            if size > piece:
                piece = size
            if piece_beside < size < rows:
                piece_beside = size
        for rank, stop in held.items():
            missing[rank] += 0 if causal else length - stop
            documents[rank] += 1
        if within is not None:
            most_held = max(most_held, _of_several(pieces))
            if len(held) > 1:
                exchange.add_within(pieces, tokens, within)
            continue
        for rank, size in tokens.items():  # pieces of which are one block
            sizes[rank].append(size)
            if size > most_held:
                most_held = size
        if len(held) > 1:
            exchange.add(pieces, tokens, causal=causal)
            exchange.crossing.add_whole(tokens, 1)
    size = row.group_size
    groups = [row.shards[first : first + size] for first in range(0, row.p, size)]
    starts = [[start for shard in group for start, _ in shard] for group in groups]
    longest, group_keys = max(row.lengths), 0
    longest = longest if longest < row.seq_length else 0
    if row.groups > 1:
        of_groups = _load_of(row.by_groups, causal, within)
        assert of_groups.buffers is not None
        longest, group_keys = min(longest, of_groups.buffers.held), of_groups.keys_received
    return Load(
        seq_length=row.group_length,
        p=size,
        scores=max(sum(scores[first : first + size]) for first in range(0, row.p, size)),
        fullest_scores=max(scores),
        keys_received=max(missing),
        documents=len(row.lengths),
        fullest_documents=max(documents),
        peers=exchange.peers,
        in_order=all(of_group == sorted(of_group) for of_group in starts),
        groups=row.groups,
        group_keys=group_keys,
        buffers=RowSizes(
            longest=longest,
            piece=piece,
            piece_beside=piece_beside,
            held=most_held,
            keys_sent=max(exchange.sent),
            fewest_keys=min(missing),
            pieces=max(num_pieces),
            padded=sum(row.lengths) < row.seq_length,
            **exchange.moments(missing, rows)._asdict(),
            **_calls(row, sizes, exchange, window),
        ),
    )


def _calls(row: Row, sizes: list[list[int]], exchange: Exchange, window: int) -> dict[str, int]:
    """Of RowSizes, those of a flash kernel's calls. sizes: of blocks, by rank, as positions are."""
    rows = row.seq_length // row.p
    call, call_rows = largest_call(row.lengths, window)
    here = here_rows = beside = 0
    for rank, (of_rank, shard) in enumerate(zip(sizes, row.shards, strict=True)):
        if window < row.seq_length and list(shard) != sorted(shard):
            of_rank = row.piece_sizes(rank)
        tokens, summed = largest_call(of_rank, window)
        here, here_rows = max(here, tokens), max(here_rows, summed)
        if beside < tokens < rows:
            beside = tokens
    return {
        "crossing": min(exchange.crossing.most, rows),
        "crossing_rows": exchange.crossing.most_rows,
        "call": min(call, row.group_length),
        "call_rows": call_rows,
        "call_here": here,
        "call_here_rows": here_rows,
        "call_beside": beside,
    }


def _of_several(pieces: Pieces) -> int:
    """Tokens of the largest piece of which its rank holds another."""
    counts = pieces_by_rank(pieces)
    return max((stop - a for rank, a, stop in pieces if counts[rank] > 1), default=0)


def _documents(row: Row) -> Iterator[tuple[int, Pieces]]:
    """The length of each document, and what ranks hold of it."""
    ranges = iter(sorted((stop, r) for r, shard in enumerate(row.shards) for _, stop in shard))
    range_stop, rank = next(ranges)
    position = 0
    for length in row.lengths:
        begin, stop = position, position + length
        pieces: Pieces = []
        while position < stop:
            if position == range_stop:
                range_stop, rank = next(ranges)
            first, position = position, min(range_stop, stop)
            pieces.append((rank, first - begin, position - begin))
        yield length, pieces


def load_of_one(seq_length: int, p: int, *, causal: bool, window: int | None = None) -> Load:
    """Of one document of s tokens that runs alone, spread as the strategies' rings do.

    All its keys go to every rank, unless the window is narrow.
    """
    s = seq_length
    scores = s * (s + 1) // 2 if causal else s * s
    load = Load(s, p, scores, -(-scores // p), s - s // p, 1, 1, p - 1)
    if window is None:
        return load
    size, total = -(-s // p), scores_up_to(s, window)
    if is_narrow(window, s, p):
        peers = min(2 * -(-(window - 1) // size), p - 1)
        within = replace(load, scores=total, fullest_scores=size * window, peers=peers)
        return replace(load, within=replace(within, keys_received=window - 1))
    half = (size + 1) // 2
    ends = [min(r * size + rows, s) for r in range(p) for rows in (0, half)] + [s]
    parts = [scores_up_to(b, window) - scores_up_to(a, window) for a, b in pairwise(ends)]
    fullest = max(a + b for a, b in zip(parts[:p], reversed(parts[p:]), strict=True))
    within = replace(load, scores=total, fullest_scores=fullest)
    return replace(load, within=within)


def unpacked(load: Load, window: int | None) -> Load:
    """Of a row of one document, which runs alone, where load_of_one says."""
    alone = load_of_one(load.seq_length, load.p, causal=True, window=window).within
    if load.within is None or alone is None:
        return load
    names = ("fullest_scores", "keys_received", "peers")
    within = replace(load.within, **{name: getattr(alone, name) for name in names})
    if window is not None and is_narrow(window, load.seq_length, load.p):
        within = replace(within, buffers=load_in_chunks(load.seq_length, load.p, window).buffers)
    return replace(load, within=within)


@lru_cache(maxsize=256)
def load_in_chunks(seq_length: int, p: int, window: int) -> Load:
    """Of one document in a chunk a rank: what the window leaves of it."""
    return load_of(contiguous((seq_length,), p), causal=True, window=window).seen(windowed=True)


def rounded_up(load: Load, *, alignment: int, causal: bool, window: int | None) -> Load:
    """A load that stands for all like it: s a multiple of alignment, and 16 sizes per doubling.

    Scores and keys count against those of one document of that s, which stays what it is. None
    becomes less.
    """
    s = aligned(load.seq_length, alignment)
    return _rounded_up(load, load_of_one(s, load.p, causal=causal, window=window))


def _rounded_up(load: Load, one: Load) -> Load:
    return replace(
        load,
        seq_length=one.seq_length,
        scores=_step_up(load.scores, one.scores),
        fullest_scores=_step_up(load.fullest_scores, one.fullest_scores),
        keys_received=_step_up(load.keys_received, one.keys_received or one.seq_length),
        group_keys=_step_up(load.group_keys, one.seq_length),
        documents=_step_up(load.documents, 1),
        fullest_documents=_step_up(load.fullest_documents, 1),
        buffers=_buffers_up(load.buffers, one) if load.buffers else None,
        within=_rounded_up(load.within, one.within) if load.within and one.within else None,
    )


def _buffers_up(buffers: RowSizes, one: Load) -> RowSizes:
    """No less of anything, but of what the rank with the fewest keys gets no more."""
    s, rows = one.seq_length, one.seq_length // one.p
    return RowSizes(
        longest=_part_up(buffers.longest, s),
        piece=_part_up(buffers.piece, rows),
        piece_beside=_part_up(buffers.piece_beside, rows),
        held=_part_up(buffers.held, rows),
        keys_sent=min(_step_up(buffers.keys_sent, rows), rows),
        keys_at_once=_step_up(buffers.keys_at_once, rows),
        fewest_keys=_step_down(buffers.fewest_keys, rows),
        pieces=_step_up(buffers.pieces, 1),
        padded=buffers.padded,
        crossing=_part_up(buffers.crossing, rows),
        crossing_rows=_step_up(buffers.crossing_rows, rows),
        call=_part_up(buffers.call, s),
        call_rows=_step_up(buffers.call_rows, s),
        call_here=_part_up(buffers.call_here, rows),
        call_here_rows=_step_up(buffers.call_here_rows, rows),
        call_beside=_part_up(buffers.call_beside, rows),
        keys_first=_step_up(buffers.keys_first, rows),
        keys_in_use=_step_up(buffers.keys_in_use, rows),
        gradients_in_use=_step_up(buffers.gradients_in_use, rows),
        gradients_sent=_step_up(buffers.gradients_sent, rows),
    )


def fullest_buffers(seq_length: int, p: int, keys_received: int) -> RowSizes:
    """Of any row of that many tokens whose ranks get so many keys."""
    rows = -(-seq_length // p)
    sent = rows if keys_received else 0
    at_once = min(keys_received, 2 * rows) + sent
    return RowSizes(seq_length, rows, rows, rows, sent, at_once)


def _part_up(value: int, whole: int) -> int:
    """All only where it is: of all there is no room beside, nor a copy."""
    return whole if value >= whole else min(_step_up(value, whole), whole - 1)


def _step_down(value: int, unit: int) -> int:
    if value <= 0 or unit <= 0:
        return 0
    step = math.floor(STEPS_PER_DOUBLING * math.log2(value / unit) + 1e-9)
    return min(value, round(unit * 2 ** (step / STEPS_PER_DOUBLING)))


def _step_up(value: int, unit: int) -> int:
    if value <= 0 or unit <= 0:
        return 0 if value <= 0 else value
    step = math.ceil(STEPS_PER_DOUBLING * math.log2(value / unit) - 1e-9)
    return max(value, round(unit * 2 ** (step / STEPS_PER_DOUBLING)))
