"""Algorithm 1 against its transcription, and against the optimum."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_paradyse.planner import HeuristicPlanner, OptimalPlanner
from tests.planner.algorithm_1 import algorithm_1
from tests.planner.brute_force import cost, every_assignment, random_problem


def problem(seed: int, granularity: str = "layer", layers: int | None = None):
    rng = random.Random(seed)
    return random_problem(
        rng,
        strategies=rng.randint(2, 6),
        layers=layers or rng.randint(1, 12),
        granularity=granularity,
        classes=rng.choice([1, 1, 2]),
        forward_only=rng.random() < 0.05,
        coarse=rng.random() < 0.3,
    )


@pytest.mark.parametrize("granularity", ["layer", "sequence"])
def test_heuristic_equals_the_transcription_of_algorithm_1(granularity):
    mixed = 0
    for seed in range(600):
        given = problem(seed, granularity)
        seconds, peak, fits = algorithm_1(given)
        outcome = HeuristicPlanner().plan(given)
        assert outcome.seconds == pytest.approx(seconds), seed
        assert outcome.fits == fits, seed
        assert fits or outcome.peak_bytes == peak, seed
        mixed += len(set(outcome.plan.layers.values())) > 1
    assert granularity == "sequence" or mixed > 30


def test_optimal_is_never_worse_than_the_heuristic():
    better = 0
    for seed in range(500):
        given = problem(seed)
        if seed % 2:
            given = replace(given, granularity="operation")
        best, other = OptimalPlanner().plan(given), HeuristicPlanner().plan(given)
        assert best.fits >= other.fits, seed
        if other.fits:
            assert best.seconds <= other.seconds * (1 + 1e-10), seed
            better += best.seconds < other.seconds * 0.99
        elif not best.fits:
            assert best.peak_bytes <= other.peak_bytes, seed
    assert better > 20


@pytest.mark.parametrize("switch", ["short_circuit", "early_termination"])
def test_what_only_saves_work_changes_no_plan(switch):
    for seed in range(150):
        given = problem(seed)
        without = HeuristicPlanner(**{switch: False}).plan(given)
        assert without.seconds == pytest.approx(HeuristicPlanner().plan(given).seconds), seed
        assert without.fits == HeuristicPlanner().plan(given).fits, seed


def test_without_pruning_or_with_mixing_never_slower():
    for seed in range(150):
        given = problem(seed)
        outcome = HeuristicPlanner().plan(given)
        for more, less in (
            (HeuristicPlanner(prune=False).plan(given), outcome),
            (outcome, HeuristicPlanner(mix=False).plan(given)),
        ):
            assert more.fits >= less.fits, seed
            assert not less.fits or more.seconds <= less.seconds * (1 + 1e-12), seed


def test_heuristic_never_exceeds_when_a_uniform_plan_fits():
    for seed in range(200):
        given = problem(seed, "sequence")
        peaks = [cost(given, assignment)[1] for assignment in every_assignment(given)]
        assert HeuristicPlanner().plan(given).fits == (min(peaks) <= given.budget_bytes), seed


def test_an_out_of_memory_prediction_does_not_stick():
    long, short = problem(3), problem(4)
    planner = HeuristicPlanner()
    before = planner.plan(short)
    planner.plan(long)
    assert planner.plan(short) == before
