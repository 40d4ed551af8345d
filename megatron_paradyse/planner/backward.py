"""The fastest plan of layers of several kinds, in any order: from the last layer to the first.

A label says that the layers from one on take `ticks` if those before it keep `room` bytes at most:
with pair j, min(room after the layer, d_j) - k_j. Of two labels of a layer, one with no more room
that takes no less is dropped; so is one whose bound passes the limit. Labels that a deadline cuts
to one room become one: there are far fewer than of what layers keep from the first on. Element-wise
arithmetic only, so that every machine rounds alike.
"""

from __future__ import annotations

from itertools import accumulate, groupby, islice
from typing import NamedTuple

import numpy as np

from megatron_paradyse.planner.kind_bounds import KindsRelaxation
from megatron_paradyse.planner.labels import MOST_LABELS, ROUNDING, Found, TooManyLabelsError
from megatron_paradyse.planner.reduce import Group


class _Front(NamedTuple):
    """The labels of a layer that none beats: both ascend."""

    room: np.ndarray  # [n] bytes
    ticks: np.ndarray  # [n]


class Layers:
    """Layers in their order, by runs: (kind, layers) of each."""

    def __init__(self, kinds: list[Group], runs: list[tuple[int, int]]):
        self._kinds, self._runs = kinds, runs
        self._order = [kind for kind, count in runs for _ in range(count)]
        self._relaxation = KindsRelaxation(kinds, self._order)
        self._kept = _least_kept(kinds, self._order)
        fastest = [float(group.ticks.min()) for group in kinds]
        self._ticks = list(accumulate((fastest[kind] for kind in self._order), initial=0.0))

    @property
    def value(self) -> float:
        """Ticks: no plan takes less."""
        return self._relaxation.value

    def search(self, limit: float, beam: int | None = None) -> tuple[float, Found] | None:
        """As labels.search; where some plan fits."""
        fronts = self._fronts(limit, beam)
        if fronts is None or not len(fronts[-1].ticks) or fronts[-1].ticks[0] > limit:
            return None
        return float(fronts[-1].ticks[0]), self._follow(fronts)

    def _fronts(self, limit: float, beam: int | None) -> list[_Front] | None:
        """The labels after the last layer, of it, ... and of the first; None if there are none."""
        relaxation = self._relaxation
        prune = limit + ROUNDING * limit + 1  # bounds are rounded, ticks are not
        slack = prune - relaxation.value
        kinds = []
        for group, excess in zip(self._kinds, relaxation.excess, strict=True):
            useful = (excess.min(axis=1) <= slack).nonzero()[0]
            kinds.append((group.take(useful), excess[useful]))
        ends, slopes = relaxation.ends, relaxation.slopes
        room, ticks = ends[-1:], np.zeros(1)
        step, free = np.array([len(ends) - 1]), np.array([slack])
        fronts = [_Front(room, ticks)]
        for layer in range(len(self._order) - 1, -1, -1):
            group, excess = kinds[self._order[layer]]
            pair, parent = (excess.take(step, axis=1) <= free).nonzero()
            if not len(pair):
                return None
            if len(pair) > MOST_LABELS:
                raise TooManyLabelsError
            ticks = ticks[parent] + group.ticks[pair]
            room = np.minimum(room[parent], group.deadline[pair]) - group.kept[pair]
            room, ticks = _best(room, ticks)
            first = room.searchsorted(self._kept[layer])
            last = ticks.searchsorted(prune - self._ticks[layer], side="right")
            room, ticks = room[first:last], ticks[first:last]
            step = ends.searchsorted(room)
            free = prune - ticks - (relaxation.rest[layer][step] - slopes[step] * room)
            alive = (free >= 0).nonzero()[0]
            if beam is not None and len(alive) > beam:
                alive = np.sort(alive[np.argsort(-free[alive], kind="stable")[:beam]])
            room, ticks, step, free = room[alive], ticks[alive], step[alive], free[alive]
            fronts.append(_Front(room, ticks))
        return fronts

    def _follow(self, fronts: list[_Front]) -> Found:
        """Of the plans as fast as the fastest label, what keeps least, layer after layer."""
        orders = [np.argsort(group.kept, kind="stable") for group in self._kinds]
        kinds = [group.take(order) for group, order in zip(self._kinds, orders, strict=True)]
        kept, left = 0.0, fronts[-1].ticks[0]
        rows = []
        for kind, (room, ticks) in zip(self._order, fronts[-2::-1], strict=True):
            group = kinds[kind]
            after, rest = kept + group.kept, left - group.ticks
            need = ticks.take(room.searchsorted(after), mode="clip")
            fits = (after <= np.minimum(group.deadline, room[-1])) & (need <= rest)
            pair = int(fits.argmax())
            assert fits[pair], "a label comes from one of the front after it"
            rows.append(int(group.rows[pair]))
            kept, left = after[pair], rest[pair]
        remaining = iter(rows)
        return [
            (run, row, len(list(same)))
            for run, (_, count) in enumerate(self._runs)
            for row, same in groupby(islice(remaining, count))
        ]


def _best(room: np.ndarray, ticks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of labels those that none with as much room beats or equals in time: both ascend.

    They come in ascending stretches, one for each pair, that a stable sort merges quickly.
    """
    order = ticks.argsort(kind="stable")
    room, ticks = room[order], ticks[order]
    keep = np.empty(len(order), dtype=bool)
    keep[0] = True
    np.greater(room[1:], np.maximum.accumulate(room)[:-1], out=keep[1:])
    room, ticks = room[keep], ticks[keep]
    again = ticks[1:] == ticks[:-1]
    if again.any():  # the last of those that take as long has most room
        last = np.append(~again, True)
        room, ticks = room[last], ticks[last]
    return room, ticks


def _least_kept(kinds: list[Group], order: list[int]) -> list[float]:
    """[layers + 1]: the least that the layers before each can keep; see least_peak.fits."""
    pairs = [sorted(zip(g.kept.tolist(), g.deadline.tolist(), strict=True)) for g in kinds]
    least = [0.0]
    for kind in order:
        least.append(next(least[-1] + k for k, d in pairs[kind] if least[-1] + k <= d))
    return least
