"""Layers of several kinds that take turns, or lie in any order, against all useful prefixes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner import of_two_kinds
from megatron_paradyse.planner import Choice, LayerOptions, OptimalPlanner, Problem
from megatron_paradyse.planner import backward as module
from megatron_paradyse.planner.backward import Layers
from megatron_paradyse.planner.kind_bounds import KindsRelaxation, _Bound
from megatron_paradyse.planner.labels import TooManyLabelsError
from megatron_paradyse.planner.reduce import Group, make_group, tick_scale
from megatron_paradyse.planner.tables import make_runs
from tests.planner.brute_force import best_of_prefixes

TOLERANCE = 1e-10
PLANNER = OptimalPlanner()
FIXED = (Choice("x", 1.0, 0, 0, 0),)


def in_turns(rng: random.Random, *, coarse: bool = False) -> Problem:
    """Two to four kinds in a pattern, or any order; some choices keep nothing; few bytes."""

    def choice(name: str) -> Choice:
        kept = 0 if name.startswith("offload") else rng.randint(0, 30)
        seconds = float(rng.randint(1, 5)) if coarse else rng.uniform(0.5, 2)
        return Choice(name, seconds, kept, rng.randint(0, 60), rng.randint(0, 90))

    names = ("a", "b", "c", "offload", "offload b")
    kinds = [
        LayerOptions(tuple(choice(name) for name in names), FIXED) for _ in range(rng.randint(2, 4))
    ]
    pattern = [rng.choice(kinds) for _ in range(rng.randint(2, 24))]
    layers = dict(enumerate(itertools.islice(itertools.cycle(pattern), rng.randint(2, 24)), 1))
    return Problem(layers, rng.randint(30, 60 + 12 * len(layers)), head_bytes=rng.randint(0, 60))


@pytest.mark.parametrize("coarse", [False, True])
def test_optimal_equals_all_prefixes(coarse):
    fits = mixed = 0
    for seed in range(400):
        problem = in_turns(random.Random(seed), coarse=coarse)
        outcome = PLANNER.plan(problem)
        expected = best_of_prefixes(problem, problem.budget_bytes)
        assert outcome.fits == (expected is not None), seed
        if not outcome.fits:
            assert best_of_prefixes(problem, outcome.peak_bytes - 1) is None, seed
            expected = best_of_prefixes(problem, outcome.peak_bytes)
        assert outcome.seconds == pytest.approx(expected, rel=TOLERANCE), seed
        assert outcome.bound_seconds == outcome.seconds, seed
        assert outcome.plan == PLANNER.plan(problem).plan, seed
        fits += outcome.fits
        mixed += len(set(outcome.plan.layers.values())) > 2
    assert 200 < fits < 395, "the budgets should be neither generous nor tight"
    assert mixed > 100


def test_optimal_equals_all_prefixes_with_realistic_costs():
    for seed in range(16):
        rng = random.Random(seed)
        problem = of_two_kinds(rng, every=rng.choice([2, 3]))
        layers = {n: problem.layers[n] for n in range(1, 7)}
        room = problem.budget_bytes - problem.base_bytes
        room = int(room * rng.uniform(0.02, 0.12))
        problem = replace(problem, layers=layers, budget_bytes=problem.base_bytes + room)
        outcome = PLANNER.plan(problem)
        budget = max(problem.budget_bytes, outcome.peak_bytes)
        expected = best_of_prefixes(problem, budget)
        assert outcome.seconds == pytest.approx(expected, rel=TOLERANCE), seed


def prepared(problem: Problem) -> tuple[list[Group], list[tuple[int, int]]]:
    """The pairs of each kind, and (kind, layers) of each run."""
    runs = make_runs(problem)
    tables = {run.table: run for run in runs}
    room, reserve, scale = problem.room_bytes, problem.reserve_bytes, tick_scale(runs)
    groups = [make_group(run, room=room, reserve=reserve, scale=scale) for run in tables.values()]
    numbers = {table: number for number, table in enumerate(tables)}
    return groups, [(numbers[run.table], run.num_layers) for run in runs]


def fitting(count: int) -> Iterator[Problem]:
    """Of layers that differ, with some plan that fits."""
    for seed in range(count):
        problem = in_turns(random.Random(seed))
        differ = len(set(map(id, problem.layers.values()))) > 1
        if differ and PLANNER.plan(problem).fits:
            yield problem


def test_no_first_layers_take_less_than_their_bound():
    near = 0
    for problem in fitting(60):
        groups, runs = prepared(problem)
        order = [kind for kind, count in runs for _ in range(count)]
        relaxation = KindsRelaxation(groups, order)
        labels = {0.0: 0.0}  # kept, ticks: all there are
        for layer, kind in enumerate(order[:8], 1):
            group = groups[kind]
            longer: dict[float, float] = {}
            for kept, ticks in labels.items():
                for t, k, d in zip(group.ticks, group.kept, group.deadline, strict=True):
                    if kept + k <= d:
                        longer[kept + k] = min(longer.get(kept + k, float("inf")), ticks + t)
            labels = longer
            for kept, ticks in labels.items():
                step = relaxation.ends.searchsorted(kept)
                bound = relaxation.rest[layer][step] - relaxation.slopes[step] * kept
                assert bound <= ticks * (1 + 1e-9) + 1, layer
                near += bound > 0.9 * ticks
    assert near > 100, "bounds far below prune nothing"


def test_no_other_prices_give_a_bound_much_above_that_found():
    """Nearer than a 256th of the spread of times: by a climb, in ever shorter steps."""
    for problem in fitting(40):
        groups, runs = prepared(problem)
        order = [kind for kind, count in runs for _ in range(count)]
        found = KindsRelaxation(groups, order).value
        ends = np.unique(np.concatenate([group.deadline for group in groups]))
        totals = np.bincount(order, minlength=len(groups)).astype(float)
        bound_of = _Bound(groups, totals, ends, np.diff(ends, prepend=0.0))
        spread = max(np.ptp(group.ticks) + 1 for group in groups)
        free = [min(g.ticks[g.kept == 0], default=np.inf) for g in groups]
        prices = np.minimum([group.ticks.max() for group in groups], free)
        best, slope, _ = bound_of(prices)
        for step in spread * 0.8 ** np.arange(50):
            for direction in (slope, *np.eye(len(groups)), *-np.eye(len(groups))):
                size = np.linalg.norm(direction)
                tried = np.minimum(prices + step * direction / max(size, 1e-9), free)
                value, of_tried, _ = bound_of(tried)
                if value > best:
                    best, slope, prices = value, of_tried, tried
        assert found >= best - 1 / 256 * spread - 1


def test_of_plans_as_fast_the_first_layers_keep_least():
    """The fast pair runs once, wherever: last, since it keeps most."""
    half = (Choice("fast", 1.0, 9, 0, 0), Choice("slow", 2.0, 1, 0, 0))
    first, second = LayerOptions(half, FIXED), LayerOptions(half, FIXED)
    layers = {n: (first, second)[n % 2] for n in range(1, 7)}
    outcome = PLANNER.plan(Problem(layers, 14))
    assert outcome.plan.runs() == "1-5 slow/x, 6 fast/x"


def test_where_a_search_is_too_long_a_beam_finds_a_plan_and_a_bound(monkeypatch):
    monkeypatch.setattr(module, "MOST_LABELS", 40)
    proved = 0
    for seed in range(100):
        problem = in_turns(random.Random(seed))
        exact = best_of_prefixes(problem, problem.budget_bytes)
        if exact is None:
            continue
        try:
            outcome = PLANNER.plan(problem)
        except TooManyLabelsError:
            continue  # the beam of 128 labels as well
        assert outcome.fits
        assert outcome.bound_seconds <= exact * (1 + TOLERANCE), seed
        assert exact <= outcome.seconds * (1 + TOLERANCE), seed
        proved += outcome.bound_seconds == outcome.seconds
    assert proved > 20


def test_many_layers_are_proved():
    """96 layers with all strategies: a dense one before those with experts, and turns of two."""
    for seed in (0, 9, 12):
        problem = of_two_kinds(random.Random(seed), every=2)
        dense, others = problem.layers[1], problem.layers[2]
        orders = (problem.layers, {n: dense if n < 4 else others for n in problem.layers})
        for layers in orders:
            outcome = PLANNER.plan(replace(problem, layers=layers))
            assert outcome.fits and outcome.bound_seconds == outcome.seconds, seed
            assert len(set(outcome.plan.layers.values())) > 2


def test_labels_of_a_layer_ascend_in_both():
    problem = of_two_kinds(random.Random(0), every=2)
    layers = Layers(*prepared(problem))
    fronts = layers._fronts(layers.value * 1.02, None)
    assert fronts is not None and max(len(front.room) for front in fronts) > 20
    for room, ticks in fronts:
        assert (room[1:] > room[:-1]).all() and (ticks[1:] > ticks[:-1]).all()


def test_nothing_is_found_below_the_fastest():
    """A bound of no layers at all may be below 0: labels of the first may pass the limit."""
    for problem in fitting(100):
        layers = Layers(*prepared(problem))
        found = layers.search(2.0**43)
        assert found is not None
        again = layers.search(found[0])
        assert again is not None and again[0] == found[0]
        for less in (1, found[0] / 1000, found[0] / 20, found[0] / 5):
            assert layers.search(found[0] - less) is None
