"""Plans of several strategies only where they gain enough, against every plan there is."""

from __future__ import annotations

import random

import pytest

from megatron_paradyse.planner import Choice, LayerOptions, OptimalPlanner, Problem
from megatron_paradyse.planner.gain import GainPlanner, is_single
from megatron_paradyse.strategies import RECOMPUTE, base_name
from tests.planner.brute_force import cost, every_assignment

BASES = ("a", "b", "c")
TOLERANCE = 1e-10


def small_problem(seed: int) -> Problem:
    """Three strategies and a variant, 2 or 3 layers, a budget that some plans pass."""
    rng = random.Random(seed)

    def choices() -> tuple[Choice, ...]:
        names = (*BASES, BASES[0] + RECOMPUTE)
        return tuple(
            Choice(name, rng.uniform(0.8, 1.2), *(rng.randint(0, 9) for _ in range(3)))
            for name in names
        )

    options = LayerOptions(choices(), choices())
    layers = dict.fromkeys(range(1, rng.randint(2, 3) + 1), options)
    return Problem(layers, budget_bytes=rng.randint(5, 60))


def expected_seconds(problem: Problem, gain: float) -> float:
    """By trying every plan."""
    fitting, single = [], []
    for assignment in every_assignment(problem):
        seconds, peak = cost(problem, assignment)
        if peak <= problem.budget_bytes:
            fitting.append(seconds)
            names = {base_name(c.name) for _, *pair in assignment for c in pair}
            if len(names) == 1:
                single.append(seconds)
    best = min(fitting)
    enough = [seconds for seconds in single if best >= seconds * (1 - gain)]
    return min(enough, default=best)


@pytest.mark.parametrize("gain", [0.0, 0.05, 0.2, 1.0])
def test_as_by_trying_every_plan(gain):
    tried = 0
    for seed in range(60):
        problem = small_problem(seed)
        outcome = GainPlanner(OptimalPlanner(), gain=gain).plan(problem)
        if outcome.fits:
            tried += 1
            expected = expected_seconds(problem, gain)
            assert outcome.seconds == pytest.approx(expected, rel=TOLERANCE)
    assert tried > 30


def test_where_nothing_fits_the_plan_is_the_planners_own():
    problem = Problem({1: LayerOptions((Choice("a", 1, 9, 9, 9),), (Choice("a", 1, 9, 9, 9),))}, 1)
    own = OptimalPlanner().plan(problem)
    assert GainPlanner(OptimalPlanner(), gain=0.5).plan(problem) == own


def test_an_mlp_of_its_own_is_no_mixture():
    attention = (Choice("a", 1.0, 0, 0, 0), Choice("b", 1.02, 0, 0, 0))
    layers = dict.fromkeys((1, 2), LayerOptions(attention, (Choice("megatron_ts", 1.0, 0, 0, 0),)))
    outcome = GainPlanner(OptimalPlanner(), gain=0.05).plan(Problem(layers, 9))
    assert {choice.attention for choice in outcome.plan.layers.values()} == {"a"}


def test_a_layer_with_one_strategy_of_its_own_leaves_the_rule_to_the_others():
    """Where one layer was pinned, the others mixed for any gain."""
    halves = [
        (Choice("a", first, 0, 0, 0), Choice("b", 2.02 - first, 0, 0, 0)) for first in (1, 1.02)
    ]
    free = LayerOptions(*halves)
    pinned = (Choice("c", 1.0, 0, 0, 0), Choice("c" + RECOMPUTE, 1.5, 0, 0, 0))
    problem = Problem({1: LayerOptions(pinned, pinned[:1]), 2: free, 3: free}, 9)
    outcome = GainPlanner(OptimalPlanner(), gain=0.05).plan(problem)
    assert outcome.plan.runs() == "1 c, 2-3 a" and is_single(problem, outcome.plan)
    mixed = GainPlanner(OptimalPlanner(), gain=0.001).plan(problem)
    assert mixed.plan.runs() == "1 c, 2-3 a/b" and not is_single(problem, mixed.plan)


def test_layers_that_may_run_other_strategies_only_are_mixed_all_the_same():
    halves = {name: (Choice(name, 1.0, 0, 0, 0),) * 1 for name in BASES}
    layers = {
        1: LayerOptions(halves["a"], halves["a"]),
        2: LayerOptions(halves["b"], halves["b"]),
    }
    assert GainPlanner(OptimalPlanner(), gain=0.5).plan(Problem(layers, 9)).seconds == 4.0


def test_one_strategy_for_all_layers_stays_one_where_layers_offer_different_variants():
    """What was left of a strategy, a here and a+recompute there, was taken for one plan."""
    a, b = BASES[:2]
    first, second = (
        (Choice(own, 1.0, 0, 0, 0), Choice(b, 1.02, 0, 0, 0)) for own in (a, a + RECOMPUTE)
    )
    layers = {1: LayerOptions(first, first), 2: LayerOptions(second, second)}
    outcome = GainPlanner(OptimalPlanner(), gain=0.05).plan(
        Problem(layers, 9, granularity="sequence")
    )
    assert outcome.plan.runs() == "1-2 b"


def test_one_strategy_for_all_layers_counts_variants_of_all_layers_only():
    """As where the host holds the inputs of the first layers alone."""
    names = ("a" + RECOMPUTE, "a+offload", "b")
    three = tuple(
        Choice(n, t, k, 0, 0) for n, t, k in zip(names, (1.0, 0.99, 1.0), (1, 0, 1), strict=True)
    )
    pinned = (Choice("c", 1.0, 0, 0, 0),)
    layers = {
        1: LayerOptions(three, pinned),
        2: LayerOptions((three[0], three[2]), pinned),
    }
    outcome = GainPlanner(OptimalPlanner(), gain=0.05).plan(
        Problem(layers, 9, granularity="sequence")
    )
    assert outcome.plan.runs() == "1-2 a+recompute/c"
