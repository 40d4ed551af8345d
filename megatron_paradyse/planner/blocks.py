"""Cuts the pairs of a run into blocks, so that the search takes few steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_paradyse.planner.labels import Bound, Combinations, Counts, Pair
from megatron_paradyse.planner.reduce import Group

_FEW = 3  # layers that a pair of a combination may run at most
_MAX_COMBINATIONS = 24

# layers, kept, ticks, what may be kept before, excess, counts
_Combination = tuple[int, float, float, float, float, Counts]
_EMPTY: _Combination = (0, 0.0, 0.0, float("inf"), 0.0, ())


def make_blocks(
    group: Group,
    most: np.ndarray,
    excess: np.ndarray,
    slack: float,
    bounds: Sequence[Bound],
) -> list[Pair | Combinations]:
    """Blocks of alike layers; the last ends the run.

    excess is the reduced cost of one layer of a pair: a combination whose sum passes the slack is
    left out. bounds[j] holds for labels after pair j.
    """
    rows, ticks = group.rows.tolist(), group.ticks.tolist()
    kept, deadline = group.kept.tolist(), group.deadline.tolist()
    limits, costs = most.tolist(), excess.tolist()
    last = len(rows) - 1
    blocks: list[Pair | Combinations] = []
    open_ = [_EMPTY]
    for j in range(last + 1):
        few = limits[j] <= _FEW and (j < last or group.num_layers == 1)
        if few:
            grown = list(open_)
            for layers, k, t, room, cost, counts in open_:
                for n in range(1, limits[j] + 1):
                    k, t, cost = k + kept[j], t + ticks[j], cost + costs[j]
                    if cost > slack or layers + n > group.num_layers:
                        break
                    item = (layers + n, k, t, min(room, deadline[j] - k), cost)
                    grown.append((*item, (*counts, (rows[j], n))))
            open_ = grown
        full = not few or j == last or len(open_) > _MAX_COMBINATIONS
        if full and len(open_) > 1 and group.num_layers > 1:
            blocks.append(_combinations(open_, bounds[j if few else j - 1]))
            open_ = [_EMPTY]
        if not few:
            ends = j == last
            number = (rows[j], ticks[j], kept[j], deadline[j], limits[j])
            blocks.append(Pair(*number, ends, bounds[j]))
    if group.num_layers == 1:
        blocks.append(_combinations(open_[1:], bounds[last], ends_run=True))
    return blocks


def _combinations(
    combinations: list[_Combination],
    bound: Bound,
    ends_run: bool = False,
) -> Combinations:
    numbers = np.array([item[:4] for item in combinations]).T
    counts = [item[5] for item in combinations]
    added, kept, ticks, room = numbers
    return Combinations(counts, added, kept, ticks, room, ends_run, bound)
