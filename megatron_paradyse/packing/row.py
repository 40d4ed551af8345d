"""A packed microbatch: documents in one sequence, and which rank holds which of their tokens."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True)
class Row:
    """Documents packed into one sequence of s tokens over p ranks.

    Positions count through the documents in their order, and then through the padding, up to s:
    a document is a contiguous range of positions. A rank holds any s/p of them.

    lengths: tokens of each document, at least 1.
    shards: for each of the p ranks the ranges of positions that its s/p rows hold, in the order of
        the rows; every position is held once, and ranges that touch are made one. Contiguous
        chunks are the case of one range a rank.
    groups: tensor-parallel groups whose ranks these are, one after the other. Of several, the row
        is wide: each group is that of another replica, and has s / groups of its positions.
    """

    lengths: tuple[int, ...]
    shards: tuple[tuple[Range, ...], ...]
    groups: int = 1

    def __post_init__(self) -> None:
        assert self.groups > 0 and len(self.shards) % self.groups == 0, "groups of one size"
        held = sorted(itertools.chain.from_iterable(self.shards))
        ends = [0, *(stop for _, stop in held)]
        assert [start for start, _ in held] == ends[:-1], "every position is held once"
        assert all(start < stop for start, stop in held), "no range is empty"
        assert len({sum(b - a for a, b in shard) for shard in self.shards}) == 1, "s/p rows each"
        assert min(self.lengths, default=0) > 0 and sum(self.lengths) <= self.seq_length
        object.__setattr__(self, "shards", tuple(map(_joined, self.shards)))

    @property
    def p(self) -> int:
        return len(self.shards)

    @cached_property
    def seq_length(self) -> int:
        """s, padding included."""
        return sum(stop - start for shard in self.shards for start, stop in shard)

    @property
    def group_length(self) -> int:
        """Positions of each group: s where there is one."""
        return self.seq_length // self.groups

    @property
    def group_size(self) -> int:
        """Ranks of a group: p where there is one."""
        return self.p // self.groups

    def rows_of(self, group: int) -> slice:
        """Of the rows of all ranks, one after the other, those of a group."""
        return slice(group * self.group_length, (group + 1) * self.group_length)

    @property
    def by_groups(self) -> Row:
        """The same with each group as one rank that holds its tokens in the order of positions."""
        size = self.group_size
        held = [sorted(itertools.chain(*self.shards[i : i + size])) for i in range(0, self.p, size)]
        return Row(self.lengths, tuple(map(tuple, held)))

    @property
    def num_tokens(self) -> int:
        """Of the documents, without padding."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Positions for which angles are needed; of one document s: their table then serves all."""
        return self.seq_length if len(self.lengths) == 1 else max(self.lengths)

    @property
    def padding(self) -> int:
        """Tokens of no document."""
        return self.seq_length - self.num_tokens

    @cached_property
    def documents(self) -> tuple[Range, ...]:
        """Each document's range of positions."""
        ends = list(itertools.accumulate(self.lengths, initial=0))
        return tuple(itertools.pairwise(ends))

    def places(self, *, by_rows: bool = False) -> np.ndarray:
        """The place of every position in its document, 0 in padding; by_rows: of every row.

        Rows are those of the ranks one after the other. int64 [s], not to be written to.
        """
        return _places(self, by_rows)

    def following(self) -> np.ndarray:
        """For every row the row of its document's next token, -1 at ends and in padding.

        int64 [s].
        """
        positions = _by_rows(self, np.arange(self.seq_length))
        rows = np.empty(self.seq_length + 1, np.int64)
        rows[positions] = np.arange(self.seq_length)
        goes_on = np.arange(self.seq_length) < self.num_tokens
        goes_on[np.cumsum(self.lengths) - 1] = False
        return np.where(goes_on[positions], rows[positions + 1], -1)

    def numbers(self) -> np.ndarray:
        """For every row the number of its document, from 0; as many as there are in padding.

        int64 [s].
        """
        count = len(self.lengths)
        of_positions = np.repeat(np.arange(count + 1), [*self.lengths, self.padding])
        return _by_rows(self, of_positions)

    @cached_property
    def pieces(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Per rank what it holds of documents: (document, start, stop), counted inside it."""
        return tuple(
            tuple(sorted(self._pieces_of(shard), key=lambda piece: piece[0]))
            for shard in self.shards
        )

    def piece_sizes(self, rank: int) -> list[int]:
        """Tokens of each, in the order of the rank's rows."""
        return [stop - start for _, start, stop in self._pieces_of(self.shards[rank])]

    def _pieces_of(self, shard: Sequence[Range]):
        for start, stop in shard:
            first = bisect.bisect_right(self.documents, start, key=lambda document: document[1])
            for number in range(first, len(self.documents)):
                begin, end = self.documents[number]
                if begin >= stop:
                    break
                yield number, max(start, begin) - begin, min(stop, end) - begin


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same in their order, those that touch made one."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def of_each(row: Row | None) -> str:
    """After an s in a message: whose it is, where several groups share the row."""
    return "" if row is None or row.groups == 1 else f" of each of {row.groups} replicas"


@lru_cache(maxsize=4)  # 8 s bytes each
def _places(row: Row, by_rows: bool) -> np.ndarray:
    if by_rows:
        return _by_rows(row, _places(row, False))
    lengths, places = np.array(row.lengths), np.zeros(row.seq_length, np.int64)
    starts = np.repeat(lengths.cumsum() - lengths, lengths)
    places[: len(starts)] = np.arange(len(starts)) - starts
    return places


def _by_rows(row: Row, of_positions: np.ndarray) -> np.ndarray:
    return np.concatenate([of_positions[a:b] for shard in row.shards for a, b in shard])


def aligned(length: int, alignment: int) -> int:
    """The smallest multiple of alignment that is at least length."""
    return -(-length // alignment) * alignment


def contiguous(lengths: Sequence[int], p: int, *, alignment: int | None = None) -> Row:
    """The documents one after the other, rank r holding the r-th chunk of them.

    alignment: s is a multiple of it, and it of p; None: of p.
    """
    alignment = alignment or p
    assert alignment % p == 0
    size = aligned(sum(lengths), alignment) // p
    return Row(tuple(lengths), tuple(((r * size, (r + 1) * size),) for r in range(p)))
