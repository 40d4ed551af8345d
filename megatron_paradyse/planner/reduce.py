"""Which pairs of a table can matter under a limit, and in which order a run of layers runs them.

In a run of alike layers the order with the larger workspace first has the least peak, so a pair
is described by (seconds, kept, deadline), deadline = the kept bytes that may be live after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_paradyse.planner.tables import Run


@dataclass(frozen=True, eq=False)
class Group:
    """The pairs of a run of alike layers that no other pair makes useless, by deadline."""

    num_layers: int
    rows: np.ndarray  # [m] rows of the table
    ticks: np.ndarray  # [m] seconds as whole numbers
    kept: np.ndarray  # [m]
    deadline: np.ndarray  # [m] ascending

    def take(self, useful: np.ndarray) -> Group:
        """Only these pairs."""
        return Group(
            self.num_layers,
            self.rows[useful],
            self.ticks[useful],
            self.kept[useful],
            self.deadline[useful],
        )


def tick_scale(runs: list[Run]) -> float:
    """A power of two that makes seconds whole numbers ("ticks") whose sums are exact in float64.

    A plan takes at most 2^42 ticks, so that rounding changes its time by less than 1e-11 of it.
    """
    total = sum(run.num_layers * float(run.table.seconds.max()) for run in runs)
    return float(2.0 ** (42 - np.frexp(total)[1])) if total > 0 else 1.0


def make_group(run: Run, *, room: float, reserve: float, scale: float) -> Group:
    """Drop pairs that cannot fit anywhere, or are no better than another in all three numbers.

    Replacing a pair by one that dominates it, at the same place of the order, lengthens nothing
    and raises no peak. Of equals the first in the table stays.
    """
    table = run.table
    deadline = np.minimum(room - table.workspace, room - reserve)
    fitting = np.flatnonzero(table.kept <= deadline)
    ticks = np.rint(table.seconds[fitting] * scale)
    kept, deadline = table.kept[fitting], deadline[fitting]
    order = np.lexsort((-deadline, kept, ticks))
    fitting, ticks, kept, deadline = fitting[order], ticks[order], kept[order], deadline[order]
    useful = _first_of_dominance(kept, deadline)
    order = useful[np.lexsort((kept[useful], deadline[useful]))]
    return Group(run.num_layers, fitting[order], ticks[order], kept[order], deadline[order])


def _first_of_dominance(kept: np.ndarray, deadline: np.ndarray) -> np.ndarray:
    """Of pairs by ascending seconds, those that no earlier one equals or beats in both."""
    beaten = (kept[:, None] <= kept) & (deadline[:, None] >= deadline)  # [by, whom]
    return np.flatnonzero(~np.triu(beaten, 1).any(axis=0))
