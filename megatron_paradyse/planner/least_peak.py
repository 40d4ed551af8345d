"""The least room that a plan needs, for problems whose budget no plan fits."""

from __future__ import annotations

import numpy as np

from megatron_paradyse.planner.labels import Found
from megatron_paradyse.planner.tables import Run, Table

Front = list[tuple[float, float, int]]  # kept, workspace, row


def fits(runs: list[Run], *, room: int, reserve: int) -> bool:
    """Whether some plan stays within the room.

    Layer by layer, the least that can be kept so far follows from the least before it: of the
    pairs whose workspace still fits, the one that keeps least. Exact for layers of any kinds.
    """
    return _least_kept(_fronts(runs), room)[0] <= room - reserve


def smallest(runs: list[Run], *, room: int) -> Found:
    """The plan that `fits` finds."""
    return _least_kept(_fronts(runs), room)[1]


def least_room(runs: list[Run], *, reserve: int) -> int:
    """The least room in which some plan fits, by bisection over whole bytes."""
    fronts = _fronts(runs)
    low, high = -1, reserve + sum(count * int(front[0][0]) for count, front in fronts)
    high += max(int(front[0][1]) for _, front in fronts)
    while high - low > 1:
        middle = (low + high) // 2
        if _least_kept(fronts, middle)[0] <= middle - reserve:
            high = middle
        else:
            low = middle
    return high


def _least_kept(fronts: list[tuple[int, Front]], room: float) -> tuple[float, Found]:
    """The least kept bytes after all layers, and how; infinite if a layer has no room to run."""
    total, found = 0.0, []
    for run, (num_layers, front) in enumerate(fronts):
        left = num_layers
        for kept, workspace, row in front:
            free = room - workspace - total
            if free < kept:
                continue
            count = left if kept == 0 else min(left, int(free // kept))
            found.append((run, row, count))
            total += count * kept
            left -= count
            if not left:
                break
        if left:
            return float("inf"), []
    return total, found


def _fronts(runs: list[Run]) -> list[tuple[int, Front]]:
    fronts = {table: _front(table) for table in {run.table: run for run in runs}}
    return [(run.num_layers, fronts[run.table]) for run in runs]


def _front(table: Table) -> Front:
    """The pairs that no other beats in kept and workspace: kept rises, workspace falls."""
    front: Front = []
    kept, workspace = table.kept.tolist(), table.workspace.tolist()
    for row in np.lexsort((workspace, kept)).tolist():
        if not front or workspace[row] < front[-1][1]:
            front.append((kept[row], workspace[row], row))
    return front
