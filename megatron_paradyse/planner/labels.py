"""Dynamic programming over (layers left, bytes kept, time), pruned by lower bounds.

Alike layers use their pairs in order; a block is one pair, any number of times, or a few pairs that
can each run only a few layers, with every combination of counts. A label says how many layers are
left, what all layers so far keep, and how long they take. Of two labels with as
many layers left, one that keeps no less and takes no less is dropped; so is one whose bound passes
the limit. Element-wise arithmetic only, so that every machine rounds alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROUNDING = 1e-9  # of bounds, relative
NEVER = 2.0**43  # above any sum of ticks; times 1,024 layers still exact

Counts = tuple[tuple[int, int], ...]  # (row of the table, layers), in the order in which they run
Found = list[tuple[int, int, int]]  # run, row, layers


MOST_LABELS = 400_000  # children of one block; plans for real costs need hundreds to thousands


class TooManyLabelsError(Exception):
    """The search would take too long: the problem is close to one of subset sums."""


@dataclass(frozen=True, eq=False, slots=True)
class Bound:
    """A label takes at least ticks + max over m of (rest + price * layers left + slope * kept)."""

    price: np.ndarray  # [m, 1]
    slope: np.ndarray  # [m, 1]
    rest: np.ndarray  # [m, 1]

    def above(self, left: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """What each label still needs, under each price: [m, n]."""
        return self.price * left + self.slope * kept + self.rest


@dataclass(frozen=True, eq=False, slots=True)
class Pair:
    """One pair, on 0 to `most` layers; on all layers that are left where it ends the run."""

    row: int
    ticks: float
    kept: float
    deadline: float
    most: int
    ends_run: bool
    bound: Bound

    def expand(self, left, kept, ticks, limit):
        """Parents, and the layers that the pair adds to them, within limit and deadline."""
        if self.ends_run:
            fits = (left <= self.most) & (kept + left * self.kept <= self.deadline)
            parent = np.flatnonzero(fits)
            return parent, left[parent]
        high = np.minimum(left, self.most)
        if self.kept > 0:
            high = np.minimum(high, np.floor(np.maximum(self.deadline - kept, 0) / self.kept))
        # The bound of n layers is a maximum of lines in n: each line limits n from one side.
        free = limit - ticks - self.bound.above(left, kept)
        rise = self.ticks - self.bound.price + self.bound.slope * self.kept
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            crossing = free / rise
        high = np.minimum(high, np.where(rise > 0, np.floor(crossing), np.inf).min(axis=0))
        low = np.maximum(0, np.where(rise < 0, np.ceil(crossing), 0).max(axis=0))
        low[(np.where(rise == 0, free, 0) < 0).any(axis=0)] = np.inf
        width = np.maximum(high - low + 1, 0).astype(np.intp)
        if width.sum() > MOST_LABELS:
            raise TooManyLabelsError
        parent = np.repeat(np.arange(len(left)), width)
        first = np.cumsum(width) - width
        return parent, low[parent] + (np.arange(len(parent)) - first[parent])

    def counts(self, added: float) -> Counts:
        return ((self.row, int(added)),) if added else ()


@dataclass(frozen=True, eq=False, slots=True)
class Combinations:
    """Several pairs in order, as a list of their combinations."""

    combinations: list[Counts]
    added: np.ndarray  # [c] layers
    kept: np.ndarray  # [c]
    ticks: np.ndarray  # [c]
    room: np.ndarray  # [c] what may be kept before, for every deadline to be met
    ends_run: bool
    bound: Bound

    def expand(self, left, kept, ticks, limit):
        """Parents, and which combination is added to them, within limit and deadlines."""
        fits = (kept[:, None] <= self.room) & (left[:, None] >= self.added)
        if self.ends_run:
            fits &= left[:, None] == self.added
        parent, which = np.nonzero(fits)
        if len(parent) > MOST_LABELS:
            raise TooManyLabelsError
        after = ticks[parent] + self.ticks[which]
        left, kept = left[parent] - self.added[which], kept[parent] + self.kept[which]
        alive = (self.bound.above(left, kept) + after).max(axis=0) <= limit
        return parent[alive], which[alive]


def search(
    blocks: list[Pair | Combinations], num_layers: int, limit: float, beam: int | None = None
) -> tuple[float, Found] | None:
    """The fastest filling of the layers that takes at most `limit` ticks, or None.

    With a beam only so many labels, those of least bound, go on after each block: not exact. Raises
    TooManyLabelsError rather than fill the memory.
    """
    if not blocks:
        return None
    prune = limit + ROUNDING * limit + 1  # bounds are rounded, ticks are not
    left, kept, ticks = np.array([float(num_layers)]), np.zeros(1), np.zeros(1)
    history: list[tuple[np.ndarray, np.ndarray]] = []
    for block in blocks:
        parent, which = block.expand(left, kept, ticks, prune)
        if not len(parent):
            return None
        if isinstance(block, Pair):
            added = which
            kept = kept[parent] + added * block.kept
            ticks = ticks[parent] + added * block.ticks
        else:
            added = block.added[which]
            kept = kept[parent] + block.kept[which]
            ticks = ticks[parent] + block.ticks[which]
        left = left[parent] - added
        if len(parent) > 1:
            best = _best(left, kept, ticks, alike=block.ends_run)
            left, kept, ticks = left[best], kept[best], ticks[best]
            parent, which = parent[best], which[best]
        if beam is not None and len(left) > beam:
            least = (block.bound.above(left, kept) + ticks).max(axis=0)
            best = np.sort(np.argsort(least, kind="stable")[:beam])
            left, kept, ticks = left[best], kept[best], ticks[best]
            parent, which = parent[best], which[best]
        history.append((parent, which))
    last = int(np.lexsort((kept, ticks))[0])
    if ticks[last] > limit:
        return None
    return float(ticks[last]), _trace(blocks, history, last)


def _best(left: np.ndarray, kept: np.ndarray, ticks: np.ndarray, *, alike: bool) -> np.ndarray:
    """Rows that none with as many layers left beats in kept bytes and time; equals: the first.

    alike: all have as many left. Children come in ascending stretches, one for each parent or pair:
    a stable sort by one key merges these in a tenth of the time that sorting by all three takes.
    """
    key = kept
    if not alike:
        key = left.astype(np.int64) * (int(kept.max()) + 1) + kept.astype(np.int64)
    order = np.argsort(key, kind="stable")
    begins = np.flatnonzero(np.diff(key[order], prepend=-1))
    if len(begins) < len(order):  # of those that keep as much, the fastest
        least = np.minimum.reduceat(ticks[order], begins)
        order = order[ticks[order] == np.repeat(least, np.diff(begins, append=len(order)))]
    # One running minimum over all groups: each next group (more layers left) starts far below.
    sunk = (ticks - NEVER * left)[order]
    keep = np.empty(len(order), dtype=bool)
    keep[0] = True
    np.less(sunk[1:], np.minimum.accumulate(sunk)[:-1], out=keep[1:])
    return order[keep]


def _trace(blocks, history, label: int) -> Found:
    found: Found = []
    for block, (parent, which) in zip(reversed(blocks), reversed(history), strict=True):
        chosen = which[label]
        if isinstance(block, Pair):
            counts = block.counts(chosen)
        else:
            counts = block.combinations[int(chosen)]
        found += [(0, row, count) for row, count in reversed(counts)]
        label = int(parent[label])
    return found[::-1]
