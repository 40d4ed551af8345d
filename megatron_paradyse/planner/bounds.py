"""Lower bounds on the time of what is left to place: the linear relaxation and its duals.

A run of L alike layers, pairs j by ascending deadline d_j, n_j layers each, is the integer program

    min sum_j t_j n_j    with  sum_j n_j = L  and, for every j,  sum_{i <= j} k_i n_i <= d_j.

Its relaxation fills the axis x of kept bytes from 0 to the last deadline: at x any pair with
d_j >= x may be running. For a price nu per layer the best use of a byte at x gains

    V(x) = max(0, max over j with d_j >= x of (nu - t_j) / k_j),

so nu L - integral of V is a lower bound, and the best nu makes it the optimum of the relaxation.
"""

from __future__ import annotations

import numpy as np

from megatron_paradyse.planner.blocks import make_blocks
from megatron_paradyse.planner.labels import ROUNDING, Bound, Combinations, Found, Pair, search
from megatron_paradyse.planner.reduce import Group

_MAX_PRICES = 24
_MAX_GROWTH = 8  # doublings, twice each: larger prices would only lose digits


def prices(group: Group) -> tuple[float, list[float]]:
    """The best price per layer, and all the prices tried on the way to it.

    The bound is concave and piecewise linear in the price: a tangent from either side, then where
    the two meet, until they meet on the bound itself.
    """
    ticks, kept = group.ticks.tolist(), group.kept.tolist()
    steps = _steps(group).tolist()
    free = [t for t, k in zip(ticks, kept, strict=True) if k == 0]
    ceiling = min(free, default=np.inf)
    backward = [
        (t, k, step) for t, k, step in zip(ticks, kept, steps, strict=True) if k > 0 or step > 0
    ]
    backward.reverse()

    def bound(price: float) -> tuple[float, float]:
        """The bound and its slope."""
        best, pace, value, slope = 0.0, 0.0, price * group.num_layers, float(group.num_layers)
        for t, k, step in backward:
            if price > t and k > 0 and price - t > best * k:
                best, pace = (price - t) / k, 1 / k
            value -= step * best
            slope -= step * pace
        return value, slope

    low = min(ticks)
    low_value, low_slope = low * group.num_layers, float(group.num_layers)
    high = min(2 * max(ticks) + 1, ceiling)
    tried = [low]
    while True:
        value, slope = bound(high)
        tried.append(high)
        if slope < 0 or high == ceiling or value <= low_value or len(tried) > _MAX_GROWTH:
            break
        low, low_value, low_slope = high, value, slope
        high = min(4 * high, ceiling)
    if slope >= 0:
        return (low if low_value >= value else high), tried
    high_value, high_slope = value, slope
    while len(tried) < 2 * _MAX_PRICES:
        price = (high_value - low_value + low_slope * low - high_slope * high) / (
            low_slope - high_slope
        )
        if not low < price < high:
            break
        value, slope = bound(price)
        tried.append(price)
        if value >= low_value + low_slope * (price - low) - 1e-12 * abs(value):
            return price, tried
        if slope >= 0:
            low, low_value, low_slope = price, value, slope
        else:
            high, high_value, high_slope = price, value, slope
    return (low if low_value >= high_value else high), tried


class NestedRelaxation:
    """The relaxation of one run of alike layers."""

    def __init__(self, group: Group):
        self.group = group
        price, tried = prices(group)
        self._prices = np.array(sorted(set(tried)))
        self.value, gain = _value(group, price)
        self._excess = group.ticks - price + gain * group.kept

    def search(self, limit: float, beam: int | None = None) -> tuple[float, Found] | None:
        """As labels.search."""
        return search(self.blocks(limit), self.group.num_layers, limit, beam)

    def blocks(self, limit: float) -> list[Pair | Combinations]:
        """What to search for every plan that takes at most `limit` ticks.

        Each layer adds the reduced cost of its pair to the value of the relaxation, which bounds
        how many layers a pair runs; a pair that runs none is left out.
        """
        slack = max(limit - self.value, 0.0) + ROUNDING * limit + 1
        most = most_layers(self._excess, slack, self.group.num_layers)
        useful = np.flatnonzero(most)
        if not len(useful):
            return []
        group = self.group.take(useful)
        slope, rest = _after(group, self._prices)
        price = self._prices[:, None]
        bounds = [Bound(price, slope[:, j, None], rest[:, j, None]) for j in range(len(useful))]
        return make_blocks(group, most[useful], self._excess[useful], slack, bounds)


def most_layers(excess: np.ndarray, slack: float, num_layers: int) -> np.ndarray:
    """How many layers each pair may run for its reduced cost to stay within the slack."""
    return (slack / np.maximum(excess, slack / (num_layers + 0.5))).astype(np.int64)


def _steps(group: Group) -> np.ndarray:
    """[n]: the bytes between each deadline and the one before it."""
    return group.deadline - np.concatenate(([0.0], group.deadline[:-1]))


def _value(group: Group, price: float) -> tuple[float, np.ndarray]:
    """The bound at one price, and V at every deadline."""
    gain = _gains(group, np.array([price]))[0]
    return price * group.num_layers - float((gain * _steps(group)).sum()), gain


def _gains(group: Group, prices: np.ndarray) -> np.ndarray:
    """[m, n]: V just before every deadline, for every price."""
    kept = np.where(group.kept > 0, group.kept, np.inf)
    use = np.maximum((prices[:, None] - group.ticks) / kept, 0.0)
    return np.maximum.accumulate(use[:, ::-1], axis=1)[:, ::-1]


def _after(group: Group, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[m, n] each: slope and rest of the bound after each step, when only later pairs are left.

    With K kept, the later pairs have the axis from K on: V is the next pair's up to this deadline.
    """
    gain = _gains(group, prices)
    nothing = np.zeros((len(prices), 1))
    slope = np.concatenate((gain[:, 1:], nothing), axis=1)
    areas = gain * _steps(group)
    later = np.cumsum(areas[:, ::-1], axis=1)[:, ::-1]
    later = np.concatenate((later[:, 1:], nothing), axis=1)
    rest = -later - slope * group.deadline
    # A pair that keeps nothing has no best use of bytes: it bounds the price itself.
    free = np.where(group.kept > 0, np.inf, group.ticks)
    ceiling = np.append(np.minimum.accumulate(free[::-1])[::-1][1:], np.inf)
    rest[prices[:, None] > ceiling] = -np.inf
    return slope, rest
