"""Mixes strategies only where that gains more than costs can tell apart."""

from __future__ import annotations

import dataclasses

from megatron_paradyse.plan import Plan
from megatron_paradyse.planner.problem import (
    Choice,
    LayerOptions,
    Outcome,
    Planner,
    Problem,
    problem_less,
)
from megatron_paradyse.strategies import base_name

Bases = dict[str, set[str]]  # half -> its strategies, without suffix

MEASURED_GAIN = 0.05  # below which measured costs do not tell plans apart


def mixing_gain(setting: float | None, source: str) -> float:
    """That of the settings, or what costs of this source can tell.

    Measured costs are noisy: of many plans, the fastest is one measured too low.
    """
    if setting is not None:
        return setting
    return MEASURED_GAIN if source == "measured" else 0.0


class GainPlanner:
    """A planner whose plans name several strategies only for a gain.

    A plan of a single strategy (with its variants +recompute and +offload, where those are offered)
    wherever a layer's half has a choice of several is preferred if it fits and the planner's own
    does not take less by more than this share of its time. Among many plans that of least predicted
    time is likely to be one whose costs were measured too low.
    """

    def __init__(self, planner: Planner, *, gain: float):
        if not 0 <= gain <= 1:
            raise ValueError(f"gain is a share from 0 to 1, got {gain}")
        self._planner, self._gain = planner, gain

    def plan(self, problem: Problem) -> Outcome:
        best = self._planner.plan(problem)
        if not best.fits:
            return best
        bases = _bases(problem)
        names = sorted({name for halves in bases.values() for of in halves.values() for name in of})
        single = [self._single(problem, base, best, bases) for base in names]
        fastest = min(
            (outcome for outcome in single if outcome is not None),
            key=lambda outcome: outcome.seconds,
            default=best,
        )
        return dataclasses.replace(fastest, bound_seconds=best.bound_seconds)

    def _single(
        self, problem: Problem, base: str, best: Outcome, bases: dict[int, Bases]
    ) -> Outcome | None:
        """The plan of one strategy, where it fits and mixing gains too little over it."""

        def drop(options: LayerOptions, half: str, choice: Choice) -> bool:
            return half in bases[id(options)] and base_name(choice.name) != base

        less = problem_less(problem, drop)
        if less is None or self._gains(best, _least_seconds(less)):
            return None
        outcome = self._planner.plan(less)
        return outcome if outcome.fits and not self._gains(best, outcome.seconds) else None

    def _gains(self, best: Outcome, seconds: float) -> bool:
        """Whether the plan takes enough less than these seconds."""
        return best.seconds < seconds * (1 - self._gain)


def is_single(problem: Problem, plan: Plan) -> bool:
    """Whether a plan runs one strategy, with its variants, wherever there is a choice."""
    bases = _bases(problem)
    names = (
        getattr(choice, half)
        for number, choice in plan.layers.items()
        for half in bases[id(problem.layers[number])]
    )
    return len(set(map(base_name, names))) <= 1


def _bases(problem: Problem) -> dict[int, Bases]:
    """Of the options of layers, by their id, the halves that have a choice of strategies.

    A mixture of experts' MLP may have none, nor has a layer for which the settings name one.
    """
    found: dict[int, Bases] = {}
    for options in problem.layers.values():
        if id(options) not in found:
            halves = {half: {base_name(c.name) for c in of} for half, of in options.halves.items()}
            found[id(options)] = {half: names for half, names in halves.items() if len(names) > 1}
    return found


def _least_seconds(problem: Problem) -> float:
    """No plan of the problem takes less."""
    alike: dict[int, float] = {}
    total = 0.0
    for options in problem.layers.values():
        if id(options) not in alike:
            halves = sum(min(c.seconds for c in choices) for choices in options.halves.values())
            pairs = (pair.seconds for pair in options.pairs.values())
            alike[id(options)] = min((halves, *pairs))
        total += alike[id(options)]
    return total
