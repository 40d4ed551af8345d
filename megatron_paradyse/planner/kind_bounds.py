"""Lower bounds on the time of what is left to place, where layers are of several kinds.

As in bounds.py kept bytes fill an axis x, and a layer that runs pair j lies on it before d_j. For
any V(x) >= 0 that never rises its bytes are worth V(d_j) k_j at least, and all layers together are
worth the integral of V at most, whatever their order. So with L_g layers of kind g and

    nu_g = min over the pairs j of g of (t_j + V(d_j) k_j)

sum over g of L_g nu_g - integral of V is a lower bound. Given prices nu_g, the best V is that of
bounds.py over the pairs of all kinds, and the bound is concave in the prices. With K bytes kept the
integral is from K on, and only pairs with d_j >= K remain: V and nu are steps that end at the
deadlines.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_paradyse.planner.blocks import make_blocks
from megatron_paradyse.planner.bounds import most_layers
from megatron_paradyse.planner.labels import NEVER, ROUNDING, Combinations, Pair, StepBound
from megatron_paradyse.planner.reduce import Group

_STEPS = 50  # towards the best prices


class KindsRelaxation:
    """The relaxation of several runs: `order` has (kind, layers) of each."""

    def __init__(self, kinds: list[Group], order: list[tuple[int, int]]):
        self._kinds, self._order = kinds, order
        totals = np.zeros(len(kinds))
        for kind, num_layers in order:
            totals[kind] += num_layers
        self._ends = np.unique(np.concatenate([group.deadline for group in kinds]))
        widths = np.diff(self._ends, prepend=0.0)
        self._value = _best_value(kinds, totals, self._ends, widths)
        self._steps = [np.searchsorted(self._ends, group.deadline) for group in kinds]
        costs = [
            group.ticks + self._value[steps] * group.kept
            for group, steps in zip(kinds, self._steps, strict=True)
        ]
        nu = np.array([cost.min() for cost in costs])
        self._excess = [cost - least for cost, least in zip(costs, nu, strict=True)]
        self._least = [self._least_after(*of_kind) for of_kind in zip(kinds, costs, strict=True)]
        areas = self._value * widths
        self.value = float((totals * nu).sum() - areas.sum())
        after = np.cumsum(areas[::-1])[::-1] - areas  # the integral from each end on
        rest = -after - self._value * self._ends
        self._rests = [rest]  # of the layers after each run
        for kind, num_layers in order[:0:-1]:
            rest = rest + num_layers * self._least[kind][0]
            self._rests.append(rest)
        self._rests.reverse()

    def _least_after(self, group: Group, cost: np.ndarray) -> np.ndarray:
        """[n + 1, steps]: the least of the pairs from each on that remain at each step."""
        least = np.minimum.accumulate(np.append(cost, NEVER)[::-1])[::-1]
        first = np.searchsorted(group.deadline, self._ends)
        return least[np.maximum(np.arange(len(least))[:, None], first)]

    def blocks(self, limit: float) -> list[Pair | Combinations]:
        """As NestedRelaxation.blocks."""
        slack = max(limit - self.value, 0.0) + ROUNDING * limit + 1
        made = {alike: self._blocks_of_run(*alike, slack) for alike in set(self._order)}
        if not all(made.values()):
            return []
        follows = [num_layers for _, num_layers in self._order[1:]] + [0]
        return [
            replace(
                block,
                run=run,
                next_layers=follows[run] if block.ends_run else 0,
                bound=replace(block.bound, rest=self._rests[run]),
            )
            for run, alike in enumerate(self._order)
            for block in made[alike]
        ]

    def _blocks_of_run(self, kind: int, num_layers: int, slack: float) -> list[Pair | Combinations]:
        """As of the first run: which one it is, and what comes after, is to be filled in."""
        most = most_layers(self._excess[kind], slack, num_layers)
        useful = np.flatnonzero(most)
        if not len(useful):
            return []
        group = replace(self._kinds[kind].take(useful), num_layers=num_layers)
        slopes = self._value[self._steps[kind][useful]].tolist()
        bounds = [
            StepBound(self._ends, self._least[kind][j + 1], self._value, slope, self._rests[0])
            for j, slope in zip(useful.tolist(), slopes, strict=True)
        ]
        return make_blocks(0, group, most[useful], self._excess[kind][useful], slack, bounds, 0)


def _best_value(
    kinds: list[Group], totals: np.ndarray, ends: np.ndarray, widths: np.ndarray
) -> np.ndarray:
    """[steps]: V for about the best prices, by the ellipsoid method.

    Its centre goes along the slope of the bound, and half of it is cut off each time.
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
        if not slope.any():
            value, slope, at_price = bound(centre)
            if value > best:
                best, found = value, at_price
        ahead = (shape * slope).sum(axis=1)
        size = float((slope * ahead).sum())
        if size <= 0:
            break
        centre = centre + ahead / ((n + 1) * np.sqrt(size))
        shape = n * n / (n * n - 1) * (shape - 2 / (n + 1) * ahead[:, None] * ahead / size)
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
