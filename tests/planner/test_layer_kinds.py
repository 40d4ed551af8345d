"""Plans of layers that differ: every layer by the costs of its own halves."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.recomputed import recomputed_layer
from megatron_paradyse.costs.row_costs import RowCosts
from megatron_paradyse.costs.table import CostTable
from megatron_paradyse.errors import UserError
from megatron_paradyse.hook import Planned
from megatron_paradyse.packing.placement import place
from megatron_paradyse.planner.cost_settings import read_costs
from megatron_paradyse.planner.from_file import ALIGNMENT, FilePolicies
from megatron_paradyse.planner.row_prices import RowPrices
from megatron_paradyse.preview.explain import explanation
from megatron_paradyse.preview.forecast import forecast
from megatron_paradyse.preview.layout import heading
from megatron_paradyse.preview.longest import find_longest
from megatron_paradyse.preview.setup import make_setup
from megatron_paradyse.settings import Settings
from megatron_paradyse.train.correcting import OnlineCorrection
from megatron_paradyse.train.telemetry import Microbatch
from tests.costs.synthetic import DESCRIPTION, LENGTHS, make_table
from tests.planner.brute_force import best_of_all

BASES = ("megatron_ts", "ulysses_z", "metp")
NAMES = (*BASES, *(f"{name}+recompute" for name in BASES))
OTHERS = {"attention@2": (2, 4), "mlp@3": (3, 4)}
# what the halves of the first layer cost, times: windows are quick, experts large
TIMES = {"attention@2": (0.2, 0.5), "mlp@3": (3.0, 4.0)}
LAYERS = (1, 2, 3, 4)
INPUT_BYTES = DESCRIPTION.model.hidden_size * 4 // DESCRIPTION.p  # of a token
UNABLE = ("ulysses_z", "attention@2")  # that strategy cannot run that attention


def differing_table() -> CostTable:
    alike = make_table(strategies=NAMES)
    others = []
    for name, (seconds, sizes) in TIMES.items():
        for m in alike.measurements:
            if m.operation != name.partition("@")[0]:
                continue
            if (m.strategy.removesuffix("+recompute"), name) == UNABLE:
                continue
            others.append(
                dataclasses.replace(
                    m,
                    operation=name,
                    forward_seconds=seconds * m.forward_seconds,
                    backward_seconds=seconds * m.backward_seconds,
                    kept_bytes=sizes * m.kept_bytes,
                    forward_bytes=sizes * m.forward_bytes,
                    backward_bytes=sizes * m.backward_bytes,
                )
            )
    description = dataclasses.replace(DESCRIPTION, other_layers=OTHERS)
    whole = [
        dataclasses.replace(m, operation="layer@2")  # a check, at shorter lengths
        for m in alike.measurements
        if (m.strategy, m.operation) == ("metp", "mlp") and m.seq_length <= LENGTHS[4]
    ]
    return CostTable(description, (*alike.measurements, *others, *whole), alike.constants)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    table = differing_table()
    write_cost_file(path, table, fit_table(table))
    return str(path)


def policies(path, **settings):
    settings = Settings(policy="optimal", cost_model=path, memory_margin=0.0, **settings)
    return FilePolicies(settings, read_costs(settings), 1 << 40)


def test_a_dense_mlp_runs_again_beside_experts_that_replicas_share(path, tmp_path):
    content = json.loads(Path(path).read_text())
    experts = {"experts": 8, "expert_parallel": 4}
    dense = {"attention": {}, "mlp": {"experts": 0}, "attention@2": {}, "mlp@3": experts}
    content["description"]["halves"] = dense
    told = tmp_path / "told.json"
    told.write_text(json.dumps(content))
    made = policies(str(told))
    layers = made.policy(made.stage(), smooth=False).problem(LAYERS, 1, 1024, False).layers
    offered = {number: {choice.name for choice in layers[number].mlp} for number in LAYERS}
    assert offered == {1: {*NAMES}, 2: {*NAMES}, 3: {*BASES}, 4: {*BASES}}


def policy(path, budget_bytes=1 << 40, **settings):
    made = policies(path, **settings)
    return made.policy(made.stage(budget=budget_bytes), smooth=False)


@pytest.mark.parametrize("forward_only", [False, True])
def test_every_layer_has_the_costs_of_its_own_halves(path, forward_only):
    model = read_cost_file(path).require_model()
    problem = policy(path).problem(LAYERS, 1, 1024, forward_only)
    assert len(set(map(id, problem.layers.values()))) == 4
    for number, options in problem.layers.items():
        attention, mlp = (
            ("attention", "attention@2")[number in (2, 4)],
            ("mlp", "mlp@3")[number > 2],
        )
        for choices, operation in ((options.attention, attention), (options.mlp, mlp)):
            for choice in choices:
                name = choice.name
                if forward_only:
                    name = name.removesuffix("+recompute") + "+recompute"
                costs = model.operation(name, operation, 1024)
                expected = costs.forward_seconds if forward_only else costs.time_seconds
                assert choice.seconds == pytest.approx(expected)
                sizes = [costs.kept_bytes, costs.forward_bytes, costs.backward_bytes]
                if forward_only:  # the half's own input, and its layer's
                    held = (1 if choices is options.attention else 2) * INPUT_BYTES * 1024
                    sizes = [0, costs.kept_bytes + costs.forward_bytes + held, 0]
                assert dataclasses.astuple(choice)[2:5] == tuple(map(math.ceil, sizes))
        for (first, second), pair in options.pairs.items():
            layer = recomputed_layer(
                first,
                second,
                lambda name, half: model.operation(name, half, 1024),
                (attention, mlp),
            )
            assert pair.seconds == pytest.approx(layer.time_seconds)
            sizes = layer.kept_bytes, layer.forward_bytes, layer.backward_bytes
            assert dataclasses.astuple(pair)[2:5] == tuple(map(math.ceil, sizes))


def test_a_layer_is_offered_what_its_halves_can_run(path):
    """Of the second attention there are no costs of ulysses_z; elsewhere it may run."""
    problem = policy(path).problem(LAYERS, 1, 1024, False)
    for number, options in problem.layers.items():
        names = {choice.name for choice in options.attention}
        assert ("ulysses_z" in names) == (number in (1, 3))
        assert "ulysses_z" in {choice.name for choice in options.mlp}
    assert "ulysses_z" in policies(path).costs.strategies


def test_recomputation_is_offered_where_its_strategy_has_costs_of_that_attention(tmp_path):
    path = str(tmp_path / "costs.json")
    table = differing_table().only(lambda m: (m.strategy, m.operation) != ("metp", "attention@2"))
    write_cost_file(path, table, fit_table(table))
    made = policy(path)
    problem = made.problem(LAYERS, 1, 1024, False)
    for number, options in problem.layers.items():
        names = {choice.name for choice in options.attention}
        assert ("metp+recompute" in names) == (number in (1, 3))
    assert made.outcome(1, 1024, LAYERS).fits


@pytest.mark.parametrize("budget_mib", [130, 160, 200, 1 << 20])
def test_plans_are_the_best_of_all(path, budget_mib):
    made = policy(path, budget_mib << 20, strategies=("megatron_ts", "metp", "metp+recompute"))
    for s in (512, 4096):
        problem = made.problem(LAYERS, 1, s, False)
        fits, seconds, _ = best_of_all(problem)
        outcome = made.planner.plan(problem)
        assert (outcome.fits, outcome.seconds) == (fits, pytest.approx(seconds))


def test_another_number_of_layers_is_refused(path):
    settings = Settings(policy="optimal", cost_model=path)
    with pytest.raises(UserError, match=r"is of 4 layers that differ.* 8: profile"):
        FilePolicies(settings, read_costs(settings), 1 << 40, num_layers=8)


def test_packed_rows_are_priced_by_the_layers_own_costs(path):
    made = policy(path)
    model = read_cost_file(path).require_model()
    prices = RowPrices(made, model, LAYERS, alignment=ALIGNMENT, edge_seconds=lambda s: 0.0)
    row = place([2048, 512, 512, 64], 4, causal=True)
    outcome = made.outcome(1, row.seq_length, LAYERS, row=row)
    assert prices.seconds(row) == pytest.approx(outcome.seconds, rel=0.02)
    costs, load = RowCosts(model, made.rows.load(row)), made.rows.load(row)
    total = 0.0
    for number, choice in outcome.plan.layers.items():
        halves = zip((choice.attention, choice.mlp), made.operations(number), strict=True)
        total += sum(costs(name, half, load.seq_length).time_seconds for name, half in halves)
    assert outcome.seconds == pytest.approx(total)
    first = costs("metp", "attention", load.seq_length).time_seconds
    assert costs("metp", "attention@2", load.seq_length).time_seconds < 0.5 * first


def test_what_was_measured_is_divided_by_the_layers_own_costs(path):
    made = policies(path)
    chooses = made.policy(made.stage(), smooth=False)
    plan = {1: ("metp", "metp"), 2: ("megatron_ts", "megatron_ts")}
    outcome = chooses.outcome(1, 1024, (1, 2))
    layers = {n: type(outcome.plan[n])(*names) for n, names in plan.items()}
    planned = Planned(0, 0, 1, 1024, type(outcome.plan)(layers), 1e-4, 1.0, 10**9, None)
    online = OnlineCorrection(
        made.costs.strategies,
        made.model,
        operations=made.kinds.operations,
        rows=None,
        aligned=lambda s: s,
        static_bytes=lambda: 0,
        beside=lambda planned: 0.0,
        margin=0.03,
        renew=lambda: None,
    )
    seen = online._observe(Microbatch(planned, False, [0.0, 0.5, 1.0, 1.5])).predicted_seconds
    own = {
        "metp": [("metp", "attention"), ("metp", "mlp")],
        "megatron_ts": [("megatron_ts", "attention@2"), ("megatron_ts", "mlp")],
    }
    seconds = {
        name: sum(made.model.operation(*half, 1024).time_seconds for half in halves)
        for name, halves in own.items()
    }
    whole = sum(seconds.values())
    assert seen == pytest.approx({name: value / whole for name, value in seconds.items()})


def test_checks_of_whole_layers_say_nothing_of_how_far_the_halves_were_timed(path):
    setup = make_setup(path, {"memory_budget": "100GiB"})
    assert read_cost_file(path).require_model().strategies("layer@2") == ("metp",)
    limits = {limit.strategy: limit.profiled for limit in find_longest(setup).single}
    assert limits["metp"] == LENGTHS[-1]


def test_an_explanation_shows_the_costs_of_each_kind(path):
    setup = make_setup(path, {"memory_budget": "1GiB"})
    one = forecast(setup, 1024)
    text = explanation(setup, one)
    for number in LAYERS:
        assert f"Costs of layer {number}, forward and backward" in text
    assert "model: 4 layers of 4 kinds, h 256" in heading(setup)
    assert one.profiled
