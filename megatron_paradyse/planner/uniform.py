"""Plans of one strategy: every half of a layer that has a choice runs it."""

from __future__ import annotations

from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import Plan
from megatron_paradyse.planner.peak import evaluate
from megatron_paradyse.planner.problem import LayerOptions, Outcome, Problem, layer_choice


def common_strategies(problem: Problem) -> list[str]:
    """The strategies that every half with a choice offers, in the first such half's order.

    A half with a single choice is fixed and asks nothing of the others. If all are fixed: one
    name, for the one plan there is.
    """
    common: list[str] | None = None
    for options in dict.fromkeys(problem.layers[number] for number in sorted(problem.layers)):
        for choices in (options.attention, options.mlp):
            if len(choices) > 1:
                names = [choice.name for choice in choices]
                common = names if common is None else [n for n in common if n in names]
    if common is None:
        return [problem.layers[min(problem.layers)].attention[0].name]
    if not common:
        raise UserError(
            "one strategy for all layers needs a strategy that every layer offers, and there is "
            "none: allow one everywhere, or use granularity operation"
        )
    return common


def mixed_plan(problem: Problem, first: str, rest: str, count: int) -> Plan:
    """The first `count` layers with one strategy, the others with another."""
    layers = {}
    for position, number in enumerate(sorted(problem.layers)):
        layers[number] = _choice(problem.layers[number], first if position < count else rest)
    return Plan(layers)


def uniform_outcomes(problem: Problem) -> list[Outcome]:
    """What each strategy costs on all layers."""
    names = common_strategies(problem)
    outcomes = [evaluate(problem, mixed_plan(problem, name, name, 0)) for name in names]
    return [outcome for outcome in outcomes if outcome is not None]


def _choice(options: LayerOptions, name: str):
    attention = name if len(options.attention) > 1 else options.attention[0].name
    mlp = name if len(options.mlp) > 1 else options.mlp[0].name
    return layer_choice(attention, mlp)
