"""The peak of a plan, and what other microbatches hold."""

from __future__ import annotations

import random

import pytest

from megatron_paradyse.plan import LayerChoice, Plan
from megatron_paradyse.planner import Choice, LayerOptions, Problem, evaluate
from megatron_paradyse.planner.peak import operations, peak_bytes, walk, with_margin
from megatron_paradyse.planner.pipeline import held_besides, in_flight, shares
from megatron_paradyse.planner.tables import make_table
from tests.planner.brute_force import random_problem


def test_walk_of_two_layers_by_hand():
    attention, mlp = Choice("a", 1.0, 10, 3, 7), Choice("m", 2.0, 20, 5, 1)
    layers = dict.fromkeys((1, 2), LayerOptions((attention,), (mlp,)))
    problem = Problem(layers, 170, base_bytes=100, head_bytes=9, tail_bytes=4, embedding_bytes=50)
    plan = Plan(dict.fromkeys((1, 2), LayerChoice("a", "m")))
    forward = [100 + 50, 110 + 3, 130 + 5, 140 + 3, 160 + 5]
    backward = [160 + 1, 140 + 7, 130 + 1, 110 + 7, 100 + 50]
    assert walk(problem, operations(problem, plan)) == [*forward, 160 + 9, *backward]
    outcome = evaluate(problem, plan)
    assert (outcome.seconds, outcome.peak_bytes, outcome.fits) == (6.0, 169, True)


def test_one_pass_and_whole_layers_equal_the_walk():
    """A layer as one unit, as tables have it: its workspace is above the end of the layer."""
    for seed in range(200):
        rng = random.Random(seed)
        problem = random_problem(
            rng, strategies=4, layers=rng.randint(1, 9), classes=2, forward_only=seed % 5 == 0
        )
        chosen, units = {}, []
        for number, options in problem.layers.items():
            table = make_table(options, problem)
            row = rng.randrange(len(table.pairs))
            chosen[number] = table.choice(row)
            kept, workspace = int(table.kept[row]), int(table.workspace[row])
            units.append(Choice("unit", 1.0, kept, workspace, workspace))
        run = operations(problem, Plan(chosen))
        peak = max(walk(problem, run))
        assert peak_bytes(problem, run) == peak == peak_bytes(problem, units)


def test_a_plan_that_names_what_is_not_offered_is_not_evaluated():
    options = LayerOptions((Choice("a", 1.0, 1, 1, 1),), (Choice("m", 1.0, 1, 1, 1),))
    assert evaluate(Problem({1: options}, 9), Plan({1: LayerChoice("metp", "m")})) is None


def simulate_1f1b(stage: int, num_stages: int, num_microbatches: int) -> int:
    held = most = forwards = 0
    for backward in range(num_microbatches):
        while forwards < min(backward + num_stages - stage, num_microbatches):
            forwards, held = forwards + 1, held + 1
            most = max(most, held)
        held -= 1
    return most


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_in_flight_equals_a_simulated_1f1b(num_stages, num_microbatches):
    for stage in range(num_stages):
        expected = simulate_1f1b(stage, num_stages, num_microbatches)
        assert in_flight(stage, num_stages, num_microbatches) == expected


def test_in_flight_of_an_interleaved_pipeline():
    # Megatron: 2 (p - r - 1) + (chunks - 1) p warm-up forwards, and the one that runs
    assert in_flight(0, 4, 64, num_chunks=2) == 2 * 3 + 4 + 1
    assert in_flight(3, 4, 64, num_chunks=2) == 4 + 1
    assert in_flight(0, 4, 4, num_chunks=2) == 8  # all of them
    assert in_flight(1, 2, 64, num_chunks=3, group_size=5) == 10 + 1


def test_the_last_of_interleaved_stages_holds_inputs_and_gradients_of_every_chunk():
    """Counted on 2 CPU ranks with 2 chunks each: 5 inputs beside 3 forwards; 4 chunks: 3 of 5."""
    assert held_besides(1, 2, 8, num_chunks=2) * in_flight(1, 2, 8, num_chunks=2) == 5
    assert held_besides(1, 2, 8, num_chunks=4) * in_flight(1, 2, 8, num_chunks=4) == 5
    assert held_besides(0, 2, 8, num_chunks=2) == held_besides(7, 8, 64, num_chunks=4) == 0
    assert held_besides(1, 2, 1) == held_besides(0, 1, 8) == 0  # one microbatch, one stage


def test_shares_let_microbatches_of_any_plans_fit_together():
    for seed in range(100):
        rng = random.Random(seed)
        room, count = rng.randint(100, 1000), rng.randint(2, 6)
        others, free = shares(room, count)
        most_kept, most_walk = room - others - free, room - others
        for _ in range(20):
            kept = [rng.randint(0, most_kept) for _ in range(count - 1)]
            assert sum(kept) + most_walk <= room


def test_margin_holds_for_a_peak_above_its_estimate():
    budget = with_margin(1000, 0.05)
    assert budget * 1.05 <= 1000 < (budget + 1) * 1.05
