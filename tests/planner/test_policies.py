"""Caching, smoothing, and the policies that the hook asks."""

from __future__ import annotations

import random

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.planner import CachedPlanner, OptimalPlanner, SmoothedPlanner
from megatron_paradyse.planner.peak import evaluate
from megatron_paradyse.planner.pipeline import UNLIMITED
from megatron_paradyse.planner.policies import (
    CostSource,
    HeuristicPolicy,
    OptimalPolicy,
    StageMemory,
)

STRATEGIES = ("megatron_ts", "ulysses_z", "metp")


def numbers(operation, strategy, s, b):
    """megatron_ts is fast and large, metp slow and small; ulysses_z cannot run beyond 1,000."""
    if strategy == "ulysses_z" and s > 1000:
        return None
    seconds, kept, workspace = {
        "megatron_ts": (1.0, 8.0, 16.0),
        "ulysses_z": (1.2, 8.5, 3.0),
        "metp": (1.5, 2.5, 2.0),
    }[strategy]
    return (seconds * s * b, kept * s * b, workspace * s * b / 2, workspace * s * b)


class Counting:
    def __init__(self):
        self.count = 0

    def plan(self, problem):
        self.count += 1
        return OptimalPlanner().plan(problem)


def policy(kind=OptimalPolicy, budget=100_000, **settings):
    return kind(STRATEGIES, CostSource(numbers), StageMemory(budget), **settings)


def cached(planner, **settings):
    numbers_of = policy()
    return CachedPlanner(
        planner, lambda b, s, only: numbers_of.problem((1, 2, 3, 4), b, s, only), **settings
    )


def test_lengths_of_one_alignment_are_planned_once_and_as_the_longest():
    planner = Counting()
    cache = cached(planner, alignment=8)
    outcomes = [cache.plan(1, s) for s in (25, 30, 32)]
    assert planner.count == 1 and outcomes[0] is outcomes[2]
    assert outcomes[0] == cached(OptimalPlanner()).plan(1, 32)
    assert cache.key(1, 25) == (1, 32, False) and cache.key(1, 33, True) == (1, 40, True)
    assert cache.plan(1, 33) is not outcomes[0]
    assert cache.plan(1, 32, True) is not outcomes[0]
    assert cache.plan(2, 32) is not outcomes[0]


def test_the_cache_is_bounded_and_forgets_what_was_unused_for_longest():
    planner = Counting()
    cache = cached(planner, capacity=2)
    for s in (1, 2, 1, 3, 1):
        cache.plan(1, s)
    assert planner.count == 3
    cache.plan(1, 2)
    assert planner.count == 4


def test_smoothing_keeps_a_plan_that_is_nearly_as_fast_and_fits():
    lengths = [100, 2900, 2550, 2300, 2900, 3000, 3100, 100]
    lengths += random.Random(0).choices(lengths, k=60)  # each after others than before
    plain = cached(OptimalPlanner())
    smooth = SmoothedPlanner(cached(OptimalPlanner()), gamma=0.06)
    kept, before = 0, None
    for s in lengths:
        new, outcome = plain.plan(1, s), smooth.plan(1, s)
        assert outcome.fits == new.fits
        assert outcome.seconds <= 1.06 * new.seconds
        if before is not None:
            again = evaluate(plain.problem(plain.key(1, s)), before)
            good = again.fits and again.seconds <= 1.06 * new.seconds
            assert outcome.plan == (before if good else new.plan)
        kept += outcome.plan != new.plan
        before = outcome.plan
    assert kept > 0


def test_smoothing_resumes_from_a_saved_plan():
    lengths = [100, 1400, 1420, 1400]
    whole = SmoothedPlanner(cached(OptimalPlanner()))
    expected = [whole.plan(1, s).plan for s in lengths]
    first, second = (SmoothedPlanner(cached(OptimalPlanner())) for _ in range(2))
    begun = [first.plan(1, s).plan for s in lengths[:2]]
    second.previous = dict(first.previous)
    assert begun + [second.plan(1, s).plan for s in lengths[2:]] == expected


@pytest.mark.parametrize("kind", [OptimalPolicy, HeuristicPolicy])
def test_policies_run_the_fastest_where_it_fits_and_smaller_ones_where_not(kind):
    chooses = policy(kind)
    short, long = chooses.plan(1, 100, (3, 4, 5, 6)), chooses.plan(1, 3000, (3, 4, 5, 6))
    assert short.runs() == "3-6 megatron_ts"
    assert "metp" in long.runs() and sorted(long.layers) == [3, 4, 5, 6]
    assert chooses.outcome(1, 3000, (3, 4, 5, 6)).fits
    assert chooses.strategies == STRATEGIES


def test_a_policy_forgets_what_smoothing_keeps_and_renews_what_it_knows_of_costs():
    layers, own = (1, 2, 3, 4), policy()
    smooth = policy(gamma=0.9)
    long = smooth.plan(1, 3000, layers)
    assert smooth.plan(1, 100, layers) == long != own.plan(1, 100, layers)
    smooth.renew()
    assert smooth.plan(1, 100, layers) == long
    smooth.forget()
    assert smooth.plan(1, 100, layers) == own.plan(1, 100, layers)
    before = own.outcome(1, 3000, layers)
    own.hold(30_000)  # of 100,000
    held = own.outcome(1, 3000, layers)
    assert held.fits and held.seconds > before.seconds


def test_smoothing_judges_a_plan_anew_once_the_costs_are_others():
    layers, slower = (1, 2, 3, 4), {}

    def costs(operation, strategy, s, b):
        seconds, *sizes = numbers(operation, strategy, s, b)
        return (seconds * slower.get(strategy, 1.0), *sizes)

    names = ("megatron_ts", "metp")
    smooth = OptimalPolicy(names, CostSource(costs), StageMemory(100_000), gamma=0.9)
    long = smooth.plan(1, 3000, layers)
    assert smooth.plan(1, 100, layers) == long
    slower["metp"] = 3.0
    smooth.renew()
    assert smooth.plan(1, 100, layers).runs() == "1-4 megatron_ts"


def test_restricted_layers_run_only_what_they_may():
    def allowed(number, operation):
        return ("metp",) if number == 2 and operation == "attention" else STRATEGIES

    plan = policy(allowed=allowed).plan(1, 100, (1, 2, 3))
    assert plan[2].attention == "metp" and plan[2].mlp == plan[1].attention == "megatron_ts"


def test_evaluation_plans_forwards_alone():
    chooses = policy(budget=100_000)
    training = chooses.outcome(1, 4000, (1, 2, 3, 4))
    evaluation = chooses.outcome(1, 4000, (1, 2, 3, 4), forward_only=True)
    assert evaluation.peak_bytes < training.peak_bytes
    assert evaluation.plan != training.plan
    bound = chooses.problem((1,), 1, 100, True).layers[1].attention[0]  # all that a forward holds
    assert (bound.kept_bytes, bound.forward_bytes, bound.backward_bytes) == (0, 1600, 0)


def test_nothing_fits_is_a_warning_or_a_refusal(caplog):
    assert not policy(budget=10).outcome(1, 100, (1,)).fits
    assert "the least peak is" in caplog.text
    with pytest.raises(UserError, match="no plan for s=100, b=1 fits"):
        policy(budget=10, refuse=True).plan(1, 100, (1,))


def test_a_shape_that_nothing_can_run_is_refused():
    chooses = OptimalPolicy(("ulysses_z",), CostSource(numbers), StageMemory(10))
    with pytest.raises(UserError, match="no strategy of ulysses_z can run attention for s=2000"):
        chooses.plan(1, 2000, (1,))


def test_microbatches_in_flight_share_the_budget():
    alone = policy().outcome(1, 500, (1, 2, 3, 4))
    memory = StageMemory(100_000, num_in_flight=4)
    shared = OptimalPolicy(STRATEGIES, CostSource(numbers), memory)
    outcome = shared.outcome(1, 500, (1, 2, 3, 4))
    assert outcome.fits and outcome.seconds > alone.seconds
    problem = shared.problem((1, 2, 3, 4), 1, 500, False)
    assert problem.base_bytes == 3 * 18_750 and problem.tail_bytes == 25_000


def test_without_a_budget_microbatches_in_flight_share_nothing():
    memory = StageMemory(UNLIMITED, num_in_flight=4)
    chooses = OptimalPolicy(STRATEGIES, CostSource(numbers), memory)
    problem = chooses.problem((1, 2, 3, 4), 1, 500, False)
    assert problem.base_bytes == problem.tail_bytes == 0


def test_pairs_have_costs_of_their_own():
    def pairs(attention, mlp, s, b, operations):
        return (0.1, 1, 1, 1) if attention == mlp == "metp" else None

    chooses = OptimalPolicy(STRATEGIES, CostSource(numbers, pairs=pairs), StageMemory(10**9))
    assert chooses.plan(1, 100, (1, 2)).runs() == "1-2 metp"
