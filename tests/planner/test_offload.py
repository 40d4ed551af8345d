"""+offload as a choice: when it is one, and when it is taken."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.planner import realistic
from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import LayerChoice, Plan
from megatron_paradyse.planner import OptimalPlanner, evaluate
from megatron_paradyse.planner.cost_settings import read_costs
from megatron_paradyse.planner.from_costs import cost_source
from megatron_paradyse.planner.from_file import FilePolicies
from megatron_paradyse.settings import Restriction, Settings
from megatron_paradyse.strategies import base_name, offloads, recomputes
from tests.planner.brute_force import best_of_all
from tests.train.synthetic_costs import LAWS, write_costs

RATE = 5e8  # bytes per second
OFFLOAD = "metp+offload"
S, LAYERS = 256, (1, 2, 3)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("costs")
    options = {"gpu": {"kind": "cuda"}, "cpu": {}}
    made = {
        kind: write_costs(folder / f"{kind}.json", host_bytes_per_second=RATE, **more)
        for kind, more in options.items()
    }
    return made | {"old": write_costs(folder / "old.json", kind="cuda")}


def settings(path, **more) -> Settings:
    return Settings(policy="optimal", cost_model=str(path), head_tile=128, **more)


def problem(path, budget, layers=LAYERS, **more):
    made = FilePolicies(settings(path, memory_margin=0.0, **more), read_costs(settings(path)), 0)
    made.costs = read_costs(settings(path, **more))
    stage = made.stage(budget=int(budget))
    policy = made.policy(stage, smooth=False)
    return policy, policy.problem(layers, 1, S, False)


def test_a_gpu_with_a_known_rate_has_it_by_default_and_a_cpu_does_not(files):
    plain = tuple(LAWS)
    assert read_costs(settings(files["gpu"])).strategies == (*plain, OFFLOAD)
    assert read_costs(settings(files["gpu"], offload=False)).strategies == plain
    assert read_costs(settings(files["cpu"])).strategies == plain
    assert read_costs(settings(files["cpu"], offload=True)).strategies == (*plain, OFFLOAD)
    assert read_costs(settings(files["old"])).strategies == plain


def test_named_strategies_win(files):
    for path in (files["gpu"], files["cpu"]):
        for names in ((OFFLOAD, "metp"), ("metp",)):
            found = read_costs(settings(path, strategies=names, offload=OFFLOAD not in names))
            assert found.strategies == names
    only = Restriction((OFFLOAD,), ("metp",))
    found = read_costs(settings(files["cpu"], layers={1: only}))
    assert found.strategies == (*LAWS, OFFLOAD)


def test_without_a_rate_it_is_refused_with_the_reason(files):
    with pytest.raises(UserError, match=r"no costs of metp\+offload, nor a rate of copies to the"):
        read_costs(settings(files["old"], strategies=(OFFLOAD,)))
    with pytest.raises(UserError, match=r"offload: true, but .* has no rate of copies"):
        read_costs(settings(files["old"], offload=True))


BUDGETS = tuple(range(104_500_000, 116_000_000, 500_000))


@pytest.mark.parametrize("budget", BUDGETS[::3])
def test_plans_with_it_are_the_best_of_every_plan_tried(files, budget):
    names = ("ulysses_z", "metp", "metp+recompute", OFFLOAD)
    policy, whole = problem(files["gpu"], budget, layers=(1, 2), strategies=names)
    outcome = policy.planner.plan(whole)
    fits, seconds, peak = best_of_all(whole)
    assert outcome.fits == fits and outcome.seconds == pytest.approx(seconds)
    assert fits or outcome.peak_bytes == peak


def test_it_is_taken_where_only_it_fits_and_only_there(files):
    """Sweeping the budget: wherever it is named, +recompute in its place would not fit."""
    named = fits_with = fits_without = 0
    for budget in BUDGETS:
        policy, whole = problem(files["gpu"], budget)
        outcome = policy.planner.plan(whole)
        fits_with += outcome.fits
        other, without = problem(files["gpu"], budget, offload=False)
        if other.planner.plan(without).fits:
            fits_without += 1
            assert outcome.seconds <= other.planner.plan(without).seconds
        for number, choice in outcome.plan.layers.items():
            names = (choice.attention, choice.mlp)
            if not any(map(offloads, names)) or not outcome.fits:
                continue
            named += 1
            kept = LayerChoice(*(n.replace("+offload", "+recompute") for n in names))
            changed = evaluate(whole, Plan({**outcome.plan.layers, number: kept}))
            assert changed is not None and not changed.fits
    assert named > 2 and 2 < fits_without < fits_with < len(BUDGETS)


def test_a_layer_that_recomputes_wholly_has_one_name_for_where_its_input_waits(files):
    """Not metp+offload/metp+recompute, which runs the same; a plan that says so costs the same."""
    for budget in BUDGETS:
        policy, whole = problem(files["gpu"], budget)
        outcome = policy.planner.plan(whole)
        for number, choice in outcome.plan.layers.items():
            if recomputes(choice.attention) and recomputes(choice.mlp):
                assert offloads(choice.attention) == offloads(choice.mlp)
                suffix = "+recompute" if offloads(choice.mlp) else "+offload"
                twin = LayerChoice(choice.attention, base_name(choice.mlp) + suffix)
                same = evaluate(whole, Plan({**outcome.plan.layers, number: twin}))
                assert (same.seconds, same.peak_bytes) == (outcome.seconds, outcome.peak_bytes)


def test_a_pair_goes_by_another_name_only_where_that_is_offered():
    """Else it had no costs of a whole layer, but those of its two halves."""
    source = cost_source(lambda strategy, operation, s, b: None)
    names = ("metp+offload", "ulysses_z+recompute")
    assert source.same_pairs(set(itertools.product(names, names))) == {}
    more = (*names, "ulysses_z+offload")
    same = source.same_pairs(set(itertools.product(more, more)))
    assert same[names] == ("metp+offload", "ulysses_z+offload") and len(same) == 3


def test_an_evaluation_never_names_it(files):
    policy, _ = problem(files["gpu"], 10**9)
    plan = policy.plan(1, S, LAYERS, forward_only=True)
    assert not any(recomputes(name) for name in plan.runs().replace("/", " ").split())


@pytest.mark.parametrize("seed", [94, 197])
def test_ninety_six_layers_with_it_are_planned_with_a_proof(seed):
    """Copies have one price a byte: with too small a search these ended up to 34% slower."""
    outcome = OptimalPlanner().plan(realistic(random.Random(seed)))
    assert outcome.fits and "offload" in outcome.plan.runs()
    assert outcome.seconds == pytest.approx(outcome.bound_seconds, rel=1e-9)


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_as_many_inputs_go_to_the_host_as_it_holds(files, most):
    """The first layers', each b s/p h e bytes."""
    each = S * 256 * 4 // 4
    budget = BUDGETS[0]
    _, whole = problem(files["gpu"], budget, host_memory=f"{most * each + 1}B")
    for half in ("attention", "mlp"):
        offered = [OFFLOAD in {c.name for c in getattr(whole.layers[n], half)} for n in LAYERS]
        assert offered == [place < most for place in range(len(LAYERS))]


def test_forwards_in_flight_share_the_hosts_memory(files):
    each = S * 256 * 4 // 4
    made = FilePolicies(
        settings(files["gpu"], host_memory=f"{4 * each}B"), read_costs(settings(files["gpu"])), 0
    )
    stage = made.stage(budget=BUDGETS[-1], num_in_flight=2)
    whole = made.policy(stage, smooth=False).problem(LAYERS, 1, S, False)
    offered = [OFFLOAD in {c.name for c in whole.layers[n].attention} for n in LAYERS]
    assert offered == [True, True, False]


def test_what_only_offloads_is_offered_all_the_same(files):
    _, whole = problem(files["gpu"], BUDGETS[0], host_memory="1B", strategies=(OFFLOAD,))
    assert all(options.attention[0].name == OFFLOAD for options in whole.layers.values())
