"""Which packed rows are measured: of attention, at some of the lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_paradyse.costs.description import CAUSAL, Description
from megatron_paradyse.costs.row_sizes import packed_of
from megatron_paradyse.costs.table import ATTENTION
from megatron_paradyse.packing.load import Load
from megatron_paradyse.packing.placement import place
from megatron_paradyse.packing.row import Row
from megatron_paradyse.strategies import PACKED_ONLY, base_name

MOST_LENGTHS = 3
SHORTEST_DOCUMENT = 8  # tokens


@dataclass(frozen=True)
class RowPoint:
    """Attention of a strategy on one row; number: which of rows_of its s."""

    strategy: str
    number: int
    row: Row = field(repr=False)
    load: Load

    operation = ATTENTION
    batch_size = 1
    is_timed = True

    @property
    def seq_length(self) -> int:
        return self.row.seq_length

    @property
    def key(self) -> tuple[str, str, int, int]:
        """As a point's, with the row's number in the place of b."""
        return self.strategy, f"row {self.number}", self.seq_length, self.number

    @property
    def weight(self) -> float:
        """Roughly in proportion to its seconds."""
        s = self.seq_length
        seen = self.load.within or self.load
        return s * (1 + seen.scores * 2 / (s * 8192)) + 1024


def rows_of(seq_length: int, d: Description) -> tuple[Row, ...]:
    """Rows of s tokens, placed as training places them: of like documents, and of unlike ones."""
    s, p, causal = seq_length, d.p, d.attention_mask == CAUSAL
    alike = [[s // count] * count for count in (2, 2 * p, 8 * p)]
    skewed = [s // 2, s // 8, s // 8, *[s // 64] * 16]
    found = [
        place(lengths, p, causal=causal, alignment=s, window=d.common_window)
        for lengths in (*alike, skewed)
        if min(lengths) >= SHORTEST_DOCUMENT
    ]
    return tuple(dict.fromkeys(row for row in found if row.seq_length == s))


def row_points(
    lengths: Mapping[int, bool], strategies: Sequence[str], d: Description
) -> Iterator[RowPoint]:
    """At every other timed length from the longest down; strategies without suffix.

    What +recompute takes follows. A strategy that runs no single documents is there if others are.
    """
    timed = [s for s in lengths if lengths[s]]
    names = dict.fromkeys((*map(base_name, strategies), *PACKED_ONLY))
    for s in timed[::-2][:MOST_LENGTHS][::-1]:
        for number, row in enumerate(rows_of(s, d)):
            load = packed_of(d).load_of(row)
            for strategy in names:
                if strategy not in PACKED_ONLY or not load.crosses:
                    yield RowPoint(strategy, number, row, load)


def point_of_key(key: Sequence, d: Description) -> RowPoint | None:
    """The point that has this key; None if it is no row's."""
    strategy, operation, s, number = key
    if not str(operation).startswith("row "):
        return None
    row = rows_of(s, d)[number]
    return RowPoint(strategy, number, row, packed_of(d).load_of(row))
