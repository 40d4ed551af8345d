"""What the costs of a packed microbatch depend on: a few numbers of its row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_paradyse.packing.row import Row

STEPS_PER_DOUBLING = 16


@dataclass(frozen=True, slots=True)
class Load:
    """A row's tokens, attention work and exchange; scores are per head.

    seq_length: s, padding included. scores: unmasked, of all ranks together; fullest_scores: of the
    queries that the rank with the most of them holds. keys_received: tokens whose keys and values
    the rank with the most of them needs of others, for its queries see them. documents: how many
    there are; fullest_documents: of how many the rank with the most of them holds tokens. in_order:
    whether the rows of the ranks, one rank after the other, are in the order of positions. peers:
    the ranks with which the one that has the most of them shares documents.
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

    @property
    def crosses(self) -> bool:
        """Whether any document lies on more than one rank."""
        return self.keys_received > 0


def load_of(row: Row, *, causal: bool) -> Load:
    """One walk over documents and ranges; packing/work.py says the same rank by rank."""
    scores, missing, documents = [0] * row.p, [0] * row.p, [0] * row.p
    ranges = iter(sorted((stop, r) for r, shard in enumerate(row.shards) for _, stop in shard))
    range_stop, rank = next(ranges)
    position = 0
    sharing: dict[int, set[int]] = {}  # by rank, itself among them
    for length in row.lengths:
        start, stop = position, position + length
        held: dict[int, tuple[int, int]] = {}  # by rank: tokens, and what its queries see
        while position < stop:
            if position == range_stop:
                range_stop, rank = next(ranges)
            first, position = position - start, min(range_stop, stop)
            last = position - start
            if causal:
                scores[rank] += (last * (last + 1) - first * (first + 1)) // 2
            else:
                scores[rank] += (last - first) * length
            held[rank] = (held.get(rank, (0, 0))[0] + last - first, last if causal else length)
        for rank_of, (tokens, seen) in held.items():
            missing[rank_of] += seen - tokens
            documents[rank_of] += 1
            if len(held) > 1:
                sharing.setdefault(rank_of, set()).update(held)
    starts = [start for shard in row.shards for start, _ in shard]
    return Load(
        seq_length=row.seq_length,
        p=row.p,
        scores=sum(scores),
        fullest_scores=max(scores),
        keys_received=max(missing),
        documents=len(row.lengths),
        fullest_documents=max(documents),
        peers=max(map(len, sharing.values()), default=1) - 1,
        in_order=starts == sorted(starts),
    )


def load_of_one(seq_length: int, p: int, *, causal: bool) -> Load:
    """Of one document of s tokens, its causal scores spread evenly as the strategies do."""
    s = seq_length
    scores = s * (s + 1) // 2 if causal else s * s
    return Load(s, p, scores, -(-scores // p), s - s // p, 1, 1, p - 1)


def rounded_up(load: Load, *, alignment: int, causal: bool) -> Load:
    """A load that stands for all like it: s a multiple of alignment, and 16 sizes per doubling.

    Scores and keys count against those of one document of that s, which stays what it is. None
    becomes less.
    """
    s = -(-load.seq_length // alignment) * alignment
    one = load_of_one(s, load.p, causal=causal)
    return replace(
        load,
        seq_length=s,
        scores=_step_up(load.scores, one.scores),
        fullest_scores=_step_up(load.fullest_scores, one.fullest_scores),
        keys_received=_step_up(load.keys_received, one.keys_received),
        documents=_step_up(load.documents, 1),
        fullest_documents=_step_up(load.fullest_documents, 1),
    )


def _step_up(value: int, unit: int) -> int:
    if value <= 0 or unit <= 0:
        return 0 if value <= 0 else value
    step = math.ceil(STEPS_PER_DOUBLING * math.log2(value / unit) - 1e-9)
    return max(value, round(unit * 2 ** (step / STEPS_PER_DOUBLING)))
