"""Lower bounds on the time of the first layers, where layers are of several kinds.

As in bounds.py kept bytes fill an axis x, and a layer that runs pair j lies on it before d_j. Of
the first i layers, which keep S bytes at most, all lie before S too. For any V(x) >= 0 that never
rises the bytes of a layer are worth V(min(d_j, S)) k_j at least, and all together the integral of V
up to S at most, whatever the order. So with, for each kind g,

    nu_g(S) = min over the pairs j of g of (t_j + V(min(d_j, S)) k_j)

sum over the layers of nu_g(S) - integral of V from 0 to S is a lower bound. Given prices nu_g, the
best V for all layers is that of bounds.py over the pairs of all kinds, and the bound is concave in
the prices. V and nu are steps that end at deadlines.
"""

from __future__ import annotations

import numpy as np

from megatron_paradyse.planner.reduce import Group

_STEPS = 256  # towards the best prices, at most; two kinds need about 60
_NEAR = 1 / 256  # of the spread of times: how near to the best bound is near enough


class KindsRelaxation:
    """The relaxation of layers in their order, which has the kind of each.

    value   of all layers, ticks
    ends    [steps] where the steps of kept bytes end, ascending
    slopes  [steps] V, ticks a byte; falls
    rest    [layers + 1, steps] the bound of the first i layers is rest - slopes * S, at S's step
    excess  of each kind [pairs, steps] what a pair adds to the bound of a plan, at least, where S
            is what the layers may keep with it
    """

    def __init__(self, kinds: list[Group], order: list[int]):
        totals = np.bincount(order, minlength=len(kinds)).astype(np.float64)
        ends = np.unique(np.concatenate([group.deadline for group in kinds]))
        value = _best_value(kinds, totals, ends, np.diff(ends, prepend=0.0))
        falls = np.flatnonzero(np.append(value[1:] < value[:-1], True))
        self.ends, self.slopes = ends[falls], value[falls]
        numbers = np.arange(len(self.ends))
        least = np.empty((len(kinds), len(self.ends)))
        self.excess = []
        for kind, group in enumerate(kinds):
            before = np.minimum(np.searchsorted(self.ends, group.deadline)[:, None], numbers)
            cost = group.ticks[:, None] + self.slopes[before] * group.kept[:, None]
            least[kind] = cost.min(axis=0)
            self.excess.append(cost - least[kind])
        areas = self.slopes * np.diff(self.ends, prepend=0.0)
        self.rest = np.empty((len(order) + 1, len(self.ends)))
        self.rest[0] = self.slopes * self.ends - np.cumsum(areas)
        self.rest[1:] = self.rest[0] + np.cumsum(least[order], axis=0)
        self.value = float(self.rest[-1, -1] - self.slopes[-1] * self.ends[-1])


def _best_value(
    kinds: list[Group], totals: np.ndarray, ends: np.ndarray, widths: np.ndarray
) -> np.ndarray:
    """[steps]: V for about the best prices, by the ellipsoid method with deep cuts.

    What lies below the best bound so far is cut off along the slope of the bound at the centre
    (Bland, Goldfarb and Todd, The Ellipsoid Method: A Survey, Operations Research 29, 1981).
    """
    n = len(kinds)
    low = np.array([kind.ticks.min() for kind in kinds])
    spread = np.array([kind.ticks.max() for kind in kinds]) - low + 1
    free = np.array([min(kind.ticks[kind.kept == 0], default=np.inf) for kind in kinds])
    bound = _Bound(kinds, totals, ends, widths)
    centre, shape = low + spread, np.diag(n * (2 * spread) ** 2)
    best, found = -np.inf, np.zeros_like(ends)
    for _ in range(_STEPS):
        slope = -(centre > free).astype(np.float64)
        above = bool(slope.any())
        if above:
            behind = float((centre - free)[centre > free].sum())
        else:
            value, slope, at_price = bound(centre)
            if value > best:
                best, found = value, at_price
            behind = best - value
        ahead = (shape * slope).sum(axis=1)
        size = float(np.sqrt(max((slope * ahead).sum(), 0.0)))
        if size <= behind or (not above and size - behind <= _NEAR * spread.max()):
            break
        depth = behind / size
        centre = centre + (1 + n * depth) / (n + 1) * ahead / size
        less = 2 * (1 + n * depth) / ((n + 1) * (1 + depth)) / size**2
        shape = n * n / (n * n - 1) * (1 - depth**2) * (shape - less * ahead[:, None] * ahead)
    return found


class _Bound:
    """The bound, its slope and V, for given prices [g]."""

    def __init__(self, kinds, totals, ends, widths):
        deadline = np.concatenate([kind.deadline for kind in kinds])
        order = np.argsort(deadline, kind="stable")
        kept = np.concatenate([kind.kept for kind in kinds])[order]
        self._kept = np.where(kept > 0, kept, np.inf)
        self._ticks = np.concatenate([kind.ticks for kind in kinds])[order]
        self._kind = np.repeat(np.arange(len(kinds)), [len(kind.ticks) for kind in kinds])[order]
        self._first = np.searchsorted(deadline[order], ends)
        self._numbers = np.arange(len(order))
        self._totals, self._widths = totals, widths

    def __call__(self, prices: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        use = (prices[self._kind] - self._ticks) / self._kept
        best = np.maximum.accumulate(use[::-1])[::-1]
        which = np.where(use == best, self._numbers, len(use))
        which = np.minimum.accumulate(which[::-1])[::-1][self._first]
        value = np.maximum(best[self._first], 0.0)
        pace = np.where(value > 0, self._widths / self._kept[which], 0.0)
        slope = self._totals - np.bincount(self._kind[which], pace, len(prices))
        bound = float((prices * self._totals).sum() - (value * self._widths).sum())
        return bound, slope, value
