"""The least room that a plan needs, for problems whose budget no plan fits."""

from __future__ import annotations

import numpy as np

from megatron_paradyse.planner.tables import Run


def fits(runs: list[Run], *, room: int, reserve: int) -> bool:
    """Whether some plan stays within the room.

    Layer by layer, the least that can be kept so far follows from the least before it: of the
    pairs whose workspace still fits, the one that keeps least. Exact for layers of any kinds.
    """
    return _least_kept([(run.num_layers, _fronts(run)) for run in runs], room) <= room - reserve


def least_room(runs: list[Run], *, reserve: int) -> int:
    """The least room in which some plan fits, by bisection over whole bytes."""
    fronts = [(run.num_layers, _fronts(run)) for run in runs]
    low, high = -1, reserve + sum(count * int(front[0][0]) for count, front in fronts)
    high += max(int(front[0][1]) for _, front in fronts)
    while high - low > 1:
        middle = (low + high) // 2
        if _least_kept(fronts, middle) <= middle - reserve:
            high = middle
        else:
            low = middle
    return high


def _least_kept(fronts: list[tuple[int, list[tuple[float, float]]]], room: float) -> float:
    """The least kept bytes after all layers; infinite if some layer cannot run in the room."""
    total = 0.0
    for num_layers, front in fronts:
        left = num_layers
        for kept, workspace in front:
            free = room - workspace - total
            if free < kept:
                continue
            count = left if kept == 0 else min(left, int(free // kept))
            total += count * kept
            left -= count
            if not left:
                break
        if left:
            return float("inf")
    return total


def _fronts(run: Run) -> list[tuple[float, float]]:
    """(kept, workspace) of the pairs that no other beats in both: kept rises, workspace falls."""
    kept, workspace = run.table.kept, run.table.workspace
    front: list[tuple[float, float]] = []
    for row in np.lexsort((workspace, kept)):
        if not front or workspace[row] < front[-1][1]:
            front.append((float(kept[row]), float(workspace[row])))
    return front
