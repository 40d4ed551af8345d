"""The fastest plan whose peak stays within the budget, exactly. docs/planner.md has the proofs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_paradyse.plan import LayerChoice, Plan
from megatron_paradyse.planner.backward import Layers
from megatron_paradyse.planner.bounds import NestedRelaxation
from megatron_paradyse.planner.labels import Found, TooManyLabelsError
from megatron_paradyse.planner.least_peak import fits, least_room, smallest
from megatron_paradyse.planner.peak import evaluate
from megatron_paradyse.planner.problem import Outcome, Problem, preference, problem_less
from megatron_paradyse.planner.reduce import make_group, tick_scale
from megatron_paradyse.planner.tables import Run, make_runs
from megatron_paradyse.planner.uniform import uniform_outcomes

_FIRST_SLACK = 1 / 8  # of the difference between the slowest and the fastest pair
_NEXT_SLACK = 1.5
_BEAM = 128  # labels, where an exact search would need too many


class OptimalPlanner:
    """Exact: least time within the budget; where nothing fits, least peak, then least time."""

    def plan(self, problem: Problem) -> Outcome:
        if not problem.gather_bytes or problem.granularity == "sequence":
            return self._plan(problem)
        outcomes = [self._plan(part) for part in by_gathering(problem)]
        best = min(outcomes, key=preference)
        rivals = [o for o in outcomes if o.fits or o.exceeds_bytes == best.exceeds_bytes]
        exact = evaluate(problem, best.plan)
        assert exact is not None, "the plan is one of the problem's"
        return replace(exact, bound_seconds=min(o.bound_seconds or o.seconds for o in rivals))

    def _plan(self, problem: Problem) -> Outcome:
        if problem.granularity == "sequence":
            best = min(uniform_outcomes(problem), key=preference)
            return replace(best, bound_seconds=best.seconds)
        runs = make_runs(problem)
        room, reserve = problem.room_bytes, problem.reserve_bytes
        if problem.embedding_bytes <= room:
            found = uniform_fastest(runs, room=room, reserve=reserve)
            if found is not None:
                return _outcome(problem, runs, found)
        if problem.embedding_bytes > room or not fits(runs, room=room, reserve=reserve):
            room = max(problem.embedding_bytes, least_room(runs, reserve=reserve))
        return _outcome(problem, runs, *fastest(runs, room=room, reserve=reserve))


def by_gathering(problem: Problem) -> list[Problem]:
    """The same with gather_bytes always live, and without what gathers: problems of one base each.

    The best of their two plans is the best of all: one that gathers is judged rightly by the
    first, any other by the second.
    """
    alike = replace(problem, gather_bytes=0)
    without = problem_less(alike, lambda _options, _half, choice: choice.gathers)
    if without is alike:
        return [alike]
    whole = replace(alike, base_bytes=problem.base_bytes + problem.gather_bytes)
    return [whole] if without is None else [whole, without]


def uniform_fastest(runs: list[Run], *, room: int, reserve: int) -> Found | None:
    """The fastest pair everywhere, of several the one that keeps least, if that fits."""
    found, total = [], 0.0
    for position, run in enumerate(runs):
        tied = np.flatnonzero(run.table.seconds == run.table.seconds.min())
        row = int(tied[run.table.kept[tied].argmin()])
        total += run.num_layers * run.table.kept[row]
        if total + run.table.workspace[row] > room:
            return None
        found.append((position, row, run.num_layers))
    return found if total + reserve <= room else None


def fastest(runs: list[Run], *, room: int, reserve: int) -> tuple[Found, float | None]:
    """The layers per run and pair, in the order in which they run, where some plan fits.

    With a lower bound of the seconds where the search gave up: then the plan may not be optimal.
    """
    scale = tick_scale(runs)
    tables = {run.table: run for run in runs}
    groups = [make_group(run, room=room, reserve=reserve, scale=scale) for run in tables.values()]
    spread = max(float(group.ticks.max() - group.ticks.min()) for group in groups)
    slowest = {table: float(group.ticks.max()) for table, group in zip(tables, groups, strict=True)}
    longest = sum(slowest[run.table] * run.num_layers for run in runs)
    slack = spread * _FIRST_SLACK + 1
    space: NestedRelaxation | Layers
    if len(runs) == 1:
        space = NestedRelaxation(groups[0])
    else:
        numbers = {table: number for number, table in enumerate(tables)}
        space = Layers(groups, [(numbers[run.table], run.num_layers) for run in runs])
    try:
        while True:
            limit = min(space.value + slack, longest)
            best = space.search(limit)
            if best is not None:
                return best[1], None
            assert limit < longest, "some plan fits, and none takes longer"
            slack *= _NEXT_SLACK
    except TooManyLabelsError:
        found = smallest(runs, room=room)
        near = space.search(longest, beam=_BEAM)
        if near is None:
            return found, space.value / scale
    try:
        best = space.search(near[0])
        return (best or near)[1], None
    except TooManyLabelsError:
        return near[1], space.value / scale


def _outcome(
    problem: Problem, runs: list[Run], found: Found, bound: float | None = None
) -> Outcome:
    """Seconds and peak of a found plan, from the tables."""
    numbers = sorted(problem.layers)
    layers: dict[int, LayerChoice] = {}
    seconds, total, peak, position = 0.0, 0, problem.embedding_bytes, 0
    for run, row, count in found:
        table = runs[run].table
        layers.update(dict.fromkeys(numbers[position : position + count], table.choice(row)))
        position += count
        seconds += count * float(table.seconds[row])
        total += count * int(table.kept[row])
        peak = max(peak, total + int(table.workspace[row]))
    peak = problem.base_bytes + max(peak, total + problem.reserve_bytes)
    return Outcome(
        Plan(layers),
        seconds,
        peak,
        max(0, peak - problem.budget_bytes),
        seconds if bound is None else bound,
    )
