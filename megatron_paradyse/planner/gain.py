"""Mixes strategies only where that gains more than costs can tell apart."""

from __future__ import annotations

import dataclasses

from megatron_paradyse.plan import Plan
from megatron_paradyse.planner.problem import Choice, Outcome, Planner, Problem, problem_less
from megatron_paradyse.strategies import base_name

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
    is preferred if it fits and the planner's own does not take less by more than this share of its
    time. Among many plans that of least predicted time is likely to be one whose costs were
    measured too low.
    """

    def __init__(self, planner: Planner, *, gain: float):
        if not 0 <= gain <= 1:
            raise ValueError(f"gain is a share from 0 to 1, got {gain}")
        self._planner, self._gain = planner, gain

    def plan(self, problem: Problem) -> Outcome:
        best = self._planner.plan(problem)
        if not best.fits:
            return best
        fixed = _fixed_halves(problem)
        single = [self._single(problem, base, best, fixed) for base in _bases(problem, fixed)]
        fastest = min(
            (outcome for outcome in single if outcome is not None),
            key=lambda outcome: outcome.seconds,
            default=best,
        )
        return dataclasses.replace(fastest, bound_seconds=best.bound_seconds)

    def _single(
        self, problem: Problem, base: str, best: Outcome, fixed: set[str]
    ) -> Outcome | None:
        """The plan of one strategy, where it fits and mixing gains too little over it."""
        less = problem_less(
            problem, lambda half, choice: half not in fixed and base_name(choice.name) != base
        )
        if less is None or self._gains(best, _least_seconds(less)):
            return None
        outcome = self._planner.plan(less)
        return outcome if outcome.fits and not self._gains(best, outcome.seconds) else None

    def _gains(self, best: Outcome, seconds: float) -> bool:
        """Whether the plan takes enough less than these seconds."""
        return best.seconds < seconds * (1 - self._gain)


def is_single(problem: Problem, plan: Plan) -> bool:
    """Whether a plan runs one strategy, with its variants, wherever there is a choice."""
    halves = {"attention", "mlp"} - _fixed_halves(problem)
    names = (getattr(choice, half) for choice in plan.layers.values() for half in halves)
    return len(set(map(base_name, names))) <= 1


def _bases(problem: Problem, fixed: set[str]) -> list[str]:
    """The strategies, without suffix, of every half that has a choice; sorted."""
    return sorted(
        {
            base_name(choice.name)
            for options in problem.layers.values()
            for half, choices in _halves(options)
            if half not in fixed
            for choice in choices
        }
    )


def _fixed_halves(problem: Problem) -> set[str]:
    """The operations of which no layer has a choice, as a mixture of experts' MLP."""
    chosen = {
        half
        for options in problem.layers.values()
        for half, choices in _halves(options)
        if len(choices) > 1
    }
    return {"attention", "mlp"} - chosen


def _halves(options) -> tuple[tuple[str, tuple[Choice, ...]], ...]:
    return (("attention", options.attention), ("mlp", options.mlp))


def _least_seconds(problem: Problem) -> float:
    """No plan of the problem takes less."""
    alike: dict[int, float] = {}
    total = 0.0
    for options in problem.layers.values():
        if id(options) not in alike:
            halves = sum(min(c.seconds for c in choices) for _, choices in _halves(options))
            pairs = (pair.seconds for pair in options.pairs.values())
            alike[id(options)] = min((halves, *pairs))
        total += alike[id(options)]
    return total
