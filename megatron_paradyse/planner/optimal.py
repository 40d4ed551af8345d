"""The fastest plan whose peak stays within the budget, exactly. docs/planner.md has the proofs."""

from __future__ import annotations

import numpy as np

from megatron_paradyse.plan import Plan
from megatron_paradyse.planner.bounds import NestedRelaxation, PricedRelaxation
from megatron_paradyse.planner.labels import Found, search
from megatron_paradyse.planner.least_peak import fits, least_room
from megatron_paradyse.planner.peak import evaluate
from megatron_paradyse.planner.problem import Outcome, Problem
from megatron_paradyse.planner.reduce import Group, make_group, tick_scale
from megatron_paradyse.planner.tables import Run, make_runs
from megatron_paradyse.planner.uniform import uniform_outcomes

_FIRST_SLACK = 1 / 64  # of the difference between the slowest and the fastest pair
_NEXT_SLACK = 4


class OptimalPlanner:
    """Exact: least time within the budget; where nothing fits, least peak, then least time."""

    def plan(self, problem: Problem) -> Outcome:
        if problem.granularity == "sequence":
            return min(uniform_outcomes(problem), key=_preference)
        runs = make_runs(problem)
        room, reserve = problem.room_bytes, problem.reserve_bytes
        if problem.embedding_bytes > room or not fits(runs, room=room, reserve=reserve):
            room = max(problem.embedding_bytes, least_room(runs, reserve=reserve))
        found = fastest(runs, room=room, reserve=reserve)
        outcome = evaluate(problem, _plan(problem, runs, found))
        assert outcome is not None and outcome.peak_bytes <= problem.base_bytes + room
        return outcome


def fastest(runs: list[Run], *, room: int, reserve: int) -> Found:
    """The layers per run and pair, in the order in which they run, where some plan fits."""
    scale = tick_scale(runs)
    groups = [make_group(run, room=room, reserve=reserve, scale=scale) for run in runs]
    relaxation: NestedRelaxation | PricedRelaxation
    if len(groups) == 1:
        relaxation = NestedRelaxation(groups[0])
    else:
        relaxation = PricedRelaxation(groups, room - reserve)
    spread = max(float(group.ticks.max() - group.ticks.min()) for group in groups)
    longest = sum(float(group.ticks.max()) * group.num_layers for group in groups)
    slack = spread * _FIRST_SLACK + 1
    while True:
        limit = min(relaxation.value + slack, longest)
        best = search(relaxation.blocks(limit), groups[0].num_layers, limit)
        if best is not None:
            return best[1]
        assert limit < longest, "some plan fits, and none takes longer"
        slack *= _NEXT_SLACK


def _plan(problem: Problem, runs: list[Run], found: Found) -> Plan:
    numbers = iter(sorted(problem.layers))
    layers = {}
    for run, row, count in found:
        choice = runs[run].table.choice(row)
        for _ in range(count):
            layers[next(numbers)] = choice
    return Plan(layers)


def _preference(outcome: Outcome) -> tuple[bool, float, float]:
    """Fitting before not, then the faster, or where nothing fits the smaller."""
    if outcome.fits:
        return (False, outcome.seconds, outcome.peak_bytes)
    return (True, outcome.peak_bytes, outcome.seconds)
