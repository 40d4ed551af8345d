"""The optimal planner against every plan there is."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from megatron_paradyse.planner import Choice, LayerOptions, OptimalPlanner, Outcome, Problem
from megatron_paradyse.planner.bounds import NestedRelaxation, prices
from megatron_paradyse.planner.peak import operations, walk
from megatron_paradyse.planner.reduce import Group
from tests.planner.brute_force import (
    best_of_all,
    best_of_prefixes,
    cost,
    every_assignment,
    random_problem,
    steps_of,
)

# Seconds are rounded to 2^-42 of the longest plan before they are compared.
TOLERANCE = 1e-10
PLANNER = OptimalPlanner()
GRANULARITIES = ("operation", "layer", "sequence")


def small_problem(seed: int) -> Problem:
    """At most 4,000 plans; every granularity, unlike layers, pairs, ties, evaluation."""
    rng = random.Random(seed)
    granularity = GRANULARITIES[seed % 3]
    strategies = rng.randint(1, 4 if granularity == "operation" else 6)
    layers = rng.randint(1, 8)
    pairs = strategies**2 if granularity == "operation" else strategies
    while granularity != "sequence" and layers > 1 and pairs**layers > 4000:
        layers -= 1
    return random_problem(
        rng,
        strategies=strategies,
        layers=layers,
        granularity=granularity,
        classes=rng.choice([1, 1, 2, 3]),
        forward_only=rng.random() < 0.1,
        coarse=rng.random() < 0.5,
    )


@pytest.mark.parametrize("first", range(0, 2100, 300))
def test_optimal_equals_every_plan_tried(first):
    fitting = 0
    for seed in range(first, first + 300):
        problem = small_problem(seed)
        fits, seconds, peak = best_of_all(problem)
        outcome = PLANNER.plan(problem)
        assert outcome.fits == fits, seed
        assert outcome.seconds == pytest.approx(seconds, rel=TOLERANCE, abs=TOLERANCE), seed
        assert fits or outcome.peak_bytes == peak, seed
        assert outcome.peak_bytes == max(walk(problem, operations(problem, outcome.plan))), seed
        fitting += fits
    assert 50 < fitting < 290, "the budgets should not all be generous, nor all tight"


def gathering(problem: Problem, names: tuple[set[str], set[str]], gather_bytes: int) -> Problem:
    """The problem where attentions and MLPs of these names need a buffer for all together."""

    def marked(choice: Choice, gathers: bool) -> Choice:
        return dataclasses.replace(choice, gathers=gathers)

    made: dict[int, LayerOptions] = {}
    for options in problem.layers.values():
        halves = [
            tuple(marked(c, c.name in of) for c in half)
            for half, of in zip((options.attention, options.mlp), names, strict=True)
        ]
        pairs = {
            (a, m): marked(choice, a in names[0] or m in names[1])
            for (a, m), choice in options.pairs.items()
        }
        made[id(options)] = LayerOptions(halves[0], halves[1], pairs)
    layers = {number: made[id(options)] for number, options in problem.layers.items()}
    return dataclasses.replace(problem, layers=layers, gather_bytes=gather_bytes)


def check_with_buffer(problem: Problem, outcome: Outcome, seed: int = 0) -> None:
    """Against every plan, each judged with the buffer only if one of its choices gathers."""
    costs = []
    for assignment in every_assignment(problem):
        seconds, peak = cost(problem, assignment)
        gathers = any(c.gathers for _, *pair in assignment for c in pair)
        costs.append((seconds, peak + gathers * problem.gather_bytes))
    fitting = [c for c in costs if c[1] <= problem.budget_bytes]
    assert outcome.fits == bool(fitting), seed
    if fitting:
        seconds = min(fitting)[0]
        assert outcome.seconds == pytest.approx(seconds, rel=TOLERANCE, abs=TOLERANCE), seed
    else:
        assert outcome.peak_bytes == min(c[1] for c in costs), seed


def test_a_buffer_of_some_strategies_counts_where_the_plan_names_one():
    avoided = 0
    for seed in range(600):
        plain = small_problem(seed)
        rng = random.Random(seed)
        names = {f"s{i}" for i in range(rng.randint(1, 2))}
        of_mlp = names if seed % 2 else {"s0"}  # an MLP in tiles needs none
        problem = gathering(plain, (names, of_mlp), rng.randint(0, plain.budget_bytes))
        outcome = PLANNER.plan(problem)
        check_with_buffer(problem, outcome, seed)
        run = operations(problem, outcome.plan)
        assert outcome.peak_bytes == max(walk(problem, run)), seed
        avoided += not any(choice.gathers for choice in run)
    assert 100 < avoided < 500, "some plans should gather, some not"


def test_one_strategy_a_layer_where_the_buffer_leaves_an_attention_no_choice():
    """Its MLP recomputes in tiles without the buffer, but not beside another's attention."""
    recompute = "megatron_ts+recompute"

    def half(seconds: dict[str, float], gathers: set[str]) -> tuple[Choice, ...]:
        return tuple(Choice(name, t, 1, 1, 1, name in gathers) for name, t in seconds.items())

    attention = half(
        {"megatron_ts": 1.0, recompute: 2.0, "ulysses_z": 1.5}, {"megatron_ts", recompute}
    )
    mlp = half({"megatron_ts": 1.0, recompute: 1.2, "ulysses_z": 9.0}, {"megatron_ts"})
    layers = dict.fromkeys((1, 2), LayerOptions(attention, mlp))
    problem = Problem(layers, 20, gather_bytes=100, granularity="layer")
    outcome = PLANNER.plan(problem)
    assert outcome.plan.runs() == "1-2 ulysses_z"
    check_with_buffer(problem, outcome)


@pytest.mark.parametrize("classes", [1, 2, 3])
@pytest.mark.parametrize("granularity", ["operation", "layer"])
def test_optimal_equals_all_prefixes_with_6_strategies_and_8_layers(classes, granularity):
    for seed in range(100):
        rng = random.Random(1000 * classes + seed)
        problem = random_problem(
            rng,
            strategies=6,
            layers=8,
            granularity=granularity,
            classes=classes,
            coarse=seed % 2 == 0,
        )
        outcome = PLANNER.plan(problem)
        expected = best_of_prefixes(problem, outcome.peak_bytes)
        if outcome.fits:
            expected = best_of_prefixes(problem, problem.budget_bytes)
        elif outcome.peak_bytes > problem.base_bytes + problem.embedding_bytes:
            assert best_of_prefixes(problem, outcome.peak_bytes - 1) is None, seed
        assert outcome.seconds == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), seed


@pytest.mark.parametrize("seed", range(12))
def test_optimal_equals_all_prefixes_with_many_layers(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, strategies=3, layers=40, classes=1, coarse=True)
    outcome = PLANNER.plan(problem)
    budget = problem.budget_bytes if outcome.fits else outcome.peak_bytes
    assert outcome.seconds == pytest.approx(best_of_prefixes(problem, budget), rel=TOLERANCE)


@pytest.mark.parametrize("seed", range(60))
def test_larger_workspace_first_has_the_least_peak_of_all_orders(seed):
    rng = random.Random(seed)
    options = [
        LayerOptions(
            (Choice("a", 1.0, *[rng.randint(0, 20) for _ in range(3)]),),
            (Choice("m", 1.0, *[rng.randint(0, 20) for _ in range(3)]),),
        )
        for _ in range(5)
    ]

    def peak(order):
        problem = Problem(dict(enumerate(order)), 0)
        return cost(problem, [(o, o.attention[0], o.mlp[0]) for o in order])[1]

    def workspace(o):
        attention, mlp = o.attention[0], o.mlp[0]
        return max(attention.workspace_bytes - mlp.kept_bytes, mlp.workspace_bytes)

    best = peak(sorted(options, key=workspace, reverse=True))
    assert best == min(peak(order) for order in itertools.permutations(options))


def test_plans_put_the_larger_workspace_first():
    hungry, lean = Choice("hungry", 1.0, 5, 40, 40), Choice("lean", 2.0, 5, 0, 0)
    fixed = (Choice("x", 0.0, 0, 0, 0),)
    options = LayerOptions((hungry, lean), fixed)
    outcome = PLANNER.plan(Problem(dict.fromkeys(range(1, 9), options), 60))
    assert [outcome.plan[n].attention for n in range(1, 9)] == ["hungry"] * 4 + ["lean"] * 4
    assert outcome.peak_bytes == 60 and outcome.fits


def test_a_pair_with_costs_of_its_own_replaces_the_sum_of_its_halves():
    half = (Choice("ts", 1.0, 10, 0, 0), Choice("ts+recompute", 2.0, 4, 0, 0))
    own = {("ts+recompute", "ts+recompute"): Choice("layer", 3.5, 4, 0, 0)}
    layers = dict.fromkeys(range(1, 5), LayerOptions(half, half, own))
    outcome = PLANNER.plan(Problem(layers, 16, granularity="layer"))
    assert outcome.seconds == 4 * 3.5 and outcome.peak_bytes == 16
    without = dict.fromkeys(range(1, 5), LayerOptions(half, half))
    assert PLANNER.plan(Problem(without, 16, granularity="layer")).peak_bytes == 4 * 8


def test_where_nothing_fits_the_least_peak_and_by_how_much_it_exceeds():
    options = LayerOptions((Choice("a", 1.0, 8, 0, 0), Choice("b", 2.0, 3, 9, 0)), LEAN)
    outcome = PLANNER.plan(Problem(dict.fromkeys((1, 2, 3), options), 10, base_bytes=2))
    assert not outcome.fits
    assert outcome.peak_bytes == 2 + 2 * 3 + 9 and outcome.exceeds_bytes == 7
    assert outcome.plan.runs() == "1-2 b/x, 3 a/x"


LEAN = (Choice("x", 1.0, 0, 0, 0),)


def test_a_pair_that_keeps_nothing_does_not_run_above_its_deadline():
    """As layers with +offload do: their workspace comes on top of what earlier kinds keep."""
    early = LayerOptions((Choice("fast", 1.0, 9, 0, 0), Choice("lean", 2.0, 2, 0, 0)), LEAN)
    late = LayerOptions((Choice("offload", 1.0, 0, 6, 6), Choice("plain", 1.1, 1, 0, 0)), LEAN)
    layers = {1: early} | dict.fromkeys(range(2, 7), late)
    outcome = PLANNER.plan(Problem(layers, 10))
    assert outcome.plan.runs() == "1 lean/x, 2-6 offload/x"
    assert outcome.fits and outcome.peak_bytes == 8


def test_no_price_of_a_layer_is_above_that_of_the_cheapest_pair_that_keeps_nothing():
    """All layers may run it: a relaxation that takes longer bounds nothing."""
    kept, ticks = np.array([10.0, 0.0, 0.0]), np.array([1.0, 20.0, 50.0])
    group = Group(8, np.arange(3), ticks, kept, deadline=np.array([20.0, 30.0, 40.0]))
    relaxation = NestedRelaxation(group)
    assert prices(group)[0] == 20.0
    assert relaxation.value == 2 * 1.0 + 6 * 20.0


def test_optimal_equals_all_prefixes_where_choices_of_later_kinds_keep_nothing():
    fitting = 0
    for seed in range(200):
        problem = kinds_with_offload(random.Random(seed))
        outcome = PLANNER.plan(problem)
        expected = best_of_prefixes(problem, problem.budget_bytes)
        assert outcome.fits == (expected is not None), seed
        if expected is not None:
            assert outcome.seconds == pytest.approx(expected, rel=TOLERANCE), seed
        fitting += outcome.fits
    assert 50 < fitting < 190, "the budgets should be neither generous nor tight"


def kinds_with_offload(rng: random.Random) -> Problem:
    """Two or three kinds of layers one after the other; some choices of each keep nothing."""

    def choice(name: str) -> Choice:
        kept = 0 if name.startswith("offload") else rng.randint(1, 40)
        return Choice(name, rng.uniform(0.5, 2), kept, rng.randint(0, 60), rng.randint(0, 120))

    layers: dict[int, LayerOptions] = {}
    for _ in range(rng.randint(2, 3)):
        half = tuple(choice(name) for name in ("a", "b", "offload", "offload b"))
        options = LayerOptions(half, LEAN)
        first = len(layers) + 1
        layers |= dict.fromkeys(range(first, first + rng.randint(1, 8)), options)
    return Problem(layers, rng.randint(40, 200))


def test_of_plans_that_take_as_long_the_one_that_keeps_least():
    """Against every plan, of coarse costs with many ties."""
    ties = 0
    for seed in range(400):
        rng = random.Random(seed)
        problem = random_problem(
            rng, strategies=3, layers=rng.randint(1, 3), classes=rng.choice([1, 2]), coarse=True
        )
        outcome = PLANNER.plan(problem)
        kept = [
            sum(step.kept_bytes for item in assignment for step in steps_of(*item))
            for assignment in every_assignment(problem)
            if cost(problem, assignment)[0] == outcome.seconds
            and cost(problem, assignment)[1] <= problem.budget_bytes
        ]
        if outcome.fits:
            run = operations(problem, outcome.plan)
            assert sum(choice.kept_bytes for choice in run) == min(kept), seed
            ties += len(set(kept)) > 1
    assert ties > 20


def test_same_numbers_give_the_same_plan_whatever_their_objects():
    for seed in range(60):
        first, second = small_problem(seed), small_problem(seed)
        assert first is not second
        assert PLANNER.plan(first).plan == PLANNER.plan(second).plan


def test_a_problem_of_subset_sums_ends_with_a_proven_gap():
    rng = random.Random(1)

    def half():  # every byte saved costs the same: no pair is better than another
        kept = [rng.randint(10**8, 10**9) for _ in range(10)]
        return tuple(
            Choice(f"s{i}", 10 - 5e-9 * k, k, 0, rng.randint(0, 10**9)) for i, k in enumerate(kept)
        )

    options = LayerOptions(half(), half())
    outcome = PLANNER.plan(Problem(dict.fromkeys(range(96), options), 82 * 10**9))
    assert outcome.fits
    assert outcome.bound_seconds <= outcome.seconds <= outcome.bound_seconds * 1.001
    assert outcome == PLANNER.plan(Problem(dict.fromkeys(range(96), options), 82 * 10**9))


def test_a_part_that_does_not_fit_bounds_nothing():
    """Without the buffer there is a faster plan, of too many bytes."""
    half = (Choice("g", 2.0, 1, 1, 1, gathers=True), Choice("b", 1.0, 50, 1, 1))
    outcome = OptimalPlanner().plan(Problem({1: LayerOptions(half, half)}, 20, gather_bytes=5))
    assert outcome.plan.runs() == "1 g" and outcome.fits
    assert outcome.bound_seconds == outcome.seconds == 4.0


def test_what_is_not_tried_runs_where_there_is_nothing_else():
    a, b = Choice("a", 1.0, 1, 1, 1), Choice("b", 1.0, 1, 1, 1)
    only = LayerOptions((a,), (b,), untried=frozenset({("a", "b")}))
    assert OptimalPlanner().plan(Problem({1: only}, 99)).plan.runs() == "1 a/b"
