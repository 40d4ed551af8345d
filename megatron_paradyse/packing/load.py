"""What the costs of a packed microbatch depend on: a few numbers of its row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from megatron_paradyse.packing.row import Row

STEPS_PER_DOUBLING = 16


@dataclass(frozen=True, slots=True)
class Load:
    """A row's tokens, attention work and exchange; scores are per head.

    seq_length: s, padding included. scores: unmasked, of all ranks together; fullest_scores: of the
    queries that the rank with the most of them holds; rectangles: rows times the tokens of their
    document, nothing masked, of the rank with the most. keys_received: tokens whose keys and
    values the rank with the most of them needs of others, for its queries see them. documents: how
    many there are; fullest_documents: of how many the rank with the most of them holds tokens.
    """

    seq_length: int
    p: int
    scores: int
    fullest_scores: int
    rectangles: int
    keys_received: int
    documents: int
    fullest_documents: int

    @property
    def crosses(self) -> bool:
        """Whether any document lies on more than one rank."""
        return self.keys_received > 0


def load_of(row: Row, *, causal: bool) -> Load:
    """In time proportional to documents and ranges; packing/work.py says the same, per rank."""
    ranges = sorted((start, stop, r) for r, shard in enumerate(row.shards) for start, stop in shard)
    lengths = np.array(row.lengths, dtype=np.int64)
    stops = np.cumsum(lengths)
    edges = np.unique(np.concatenate(([0], stops, [start for start, _, _ in ranges])))
    edges = edges[edges <= stops[-1]]
    first, last = edges[:-1], edges[1:]
    document = np.searchsorted(stops, first, side="right")
    holder = np.searchsorted([start for start, _, _ in ranges], first, side="right") - 1
    rank = np.array([r for _, _, r in ranges])[holder]
    tokens, whole = last - first, lengths[document]
    rectangles = tokens * whole
    before = (stops - lengths)[document]
    a, b = first - before, last - before
    scores = (b * (b + 1) - a * (a + 1)) // 2 if causal else rectangles
    held, place = np.unique(rank * len(lengths) + document, return_inverse=True)
    seen = np.zeros(len(held), dtype=np.int64)  # of a document, by the queries that a rank holds
    np.maximum.at(seen, place, b if causal else whole)
    missing = seen - _sums(place, tokens, len(held))
    ranks = held // len(lengths)
    return Load(
        seq_length=row.seq_length,
        p=row.p,
        scores=int(scores.sum()),
        fullest_scores=_most(rank, scores, row.p),
        rectangles=_most(rank, rectangles, row.p),
        keys_received=_most(ranks, missing, row.p),
        documents=len(lengths),
        fullest_documents=_most(ranks, np.ones_like(ranks), row.p),
    )


def load_of_one(seq_length: int, p: int, *, causal: bool) -> Load:
    """Of one document of s tokens, its causal scores spread evenly as the strategies do."""
    s = seq_length
    scores = s * (s + 1) // 2 if causal else s * s
    return Load(s, p, scores, -(-scores // p), s * s // p, s - s // p, 1, 1)


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
        rectangles=_step_up(load.rectangles, one.rectangles),
        keys_received=_step_up(load.keys_received, one.keys_received),
        documents=_step_up(load.documents, 1),
        fullest_documents=_step_up(load.fullest_documents, 1),
    )


def _step_up(value: int, unit: int) -> int:
    if value <= 0 or unit <= 0:
        return 0 if value <= 0 else value
    step = math.ceil(STEPS_PER_DOUBLING * math.log2(value / unit) - 1e-9)
    return max(value, round(unit * 2 ** (step / STEPS_PER_DOUBLING)))


def _sums(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Of whole numbers, which np.bincount would make floating-point."""
    total = np.zeros(size, dtype=np.int64)
    np.add.at(total, index, values)
    return total


def _most(index: np.ndarray, values: np.ndarray, size: int) -> int:
    return int(_sums(index, values, size).max())
