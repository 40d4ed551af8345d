"""Plans of packed rows: by the row's costs, as good as any, and priced at once."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_paradyse.costs.correction import Correction, corrected
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import load_of
from megatron_paradyse.packing.placement import place
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.planner.cost_settings import Costs
from megatron_paradyse.planner.from_costs import Stage
from megatron_paradyse.planner.from_file import FilePolicies
from megatron_paradyse.planner.known import known_for_rows
from megatron_paradyse.settings import Restriction, Settings
from megatron_paradyse.strategies import base_name, recomputes
from tests.costs.test_packed_windows import measured_rows, table_of
from tests.packing.rows import zigzag
from tests.planner.brute_force import best_of_all, cost, every_assignment
from tests.planner.row_policies import (
    BASES,
    LAYERS,
    NAMES,
    P,
    best_plan,
    policies,
    policy,
    prices,
    prices_by,
    rows,
)


@pytest.mark.parametrize("budget_mib", [4, 16, 64, 1 << 20])
def test_plans_of_rows_are_the_best_of_all(budget_mib, file):
    chooses = policy(file, budget_mib)
    for row in rows(4):
        outcome = chooses.outcome(1, row.seq_length, LAYERS, row=row)
        load = chooses.rows.load(row)
        problem = chooses.problem(LAYERS, 1, load.seq_length, False, load)
        fits, seconds, _ = best_of_all(problem)
        assert (outcome.fits, outcome.seconds) == (fits, pytest.approx(seconds))
        assert chooses.plan(1, row.seq_length, LAYERS, row=row) == outcome.plan


def test_a_row_of_one_document_is_planned_as_the_document(file):
    chooses = policy(file, names=NAMES)
    for s in (256, 2048, 16384):
        alone = chooses.outcome(1, s, LAYERS)
        packed = chooses.outcome(1, s, LAYERS, row=zigzag((s,), P))
        assert (packed.plan, packed.seconds) == (alone.plan, alone.seconds)
        assert packed.peak_bytes >= alone.peak_bytes


def test_short_documents_take_less_time_than_one_long_one(file):
    chooses = policy(file)
    short, one = contiguous((256,) * 64, P), zigzag((256 * 64,), P)
    seconds = [chooses.outcome(1, r.seq_length, LAYERS, row=r).seconds for r in (short, one)]
    assert seconds[0] < 0.7 * seconds[1]


def test_local_z_runs_where_no_document_crosses_and_nowhere_else(file):
    chooses = policy(file, 64, ("local_z", "megatron_cz", "metp"))
    inside, across = contiguous((64,) * 64, P), contiguous((64,) * 31 + (128,) * 16 + (64,), P)
    assert "local_z" in chooses.plan(1, inside.seq_length, LAYERS, row=inside).runs()
    assert load_of(across, causal=True).crosses
    assert "local_z" not in chooses.plan(1, across.seq_length, LAYERS, row=across).runs()
    assert "local_z" not in chooses.plan(1, inside.seq_length, LAYERS).runs()


def test_a_row_that_no_allowed_strategy_can_run_is_refused(file):
    chooses = policy(file, layers={1: Restriction(("local_z",), ("local_z",))})
    row = zigzag((1024,), P)
    with pytest.raises(UserError, match="no strategy of local_z can run attention"):
        chooses.plan(1, 1024, LAYERS, row=row)


def test_like_rows_share_a_plan_that_is_solved_once(file):
    chooses = policy(file)
    one, two = (contiguous((256,) * 15 + (last,), P, alignment=64) for last in (254, 255))
    outcomes = [chooses.outcome(1, r.seq_length, LAYERS, row=r) for r in (one, two)]
    assert outcomes[0] is outcomes[1]
    assert chooses.outcome(1, 4096, LAYERS) is not outcomes[0]


def test_smoothing_keeps_a_row_s_plan_only_where_it_can_run(file):
    smooth = policies(file, ("local_z", "metp"), smoothing=1.0).policy(
        Stage(budget_bytes=1 << 40, static_bytes=0)
    )
    inside, across = contiguous((64,) * 64, P), zigzag((4096,), P)
    assert "local_z" in smooth.plan(1, 4096, LAYERS, row=inside).runs()
    assert "local_z" not in smooth.plan(1, 4096, LAYERS, row=across).runs()


def test_corrections_apply_to_rows(file):
    correction = Correction(NAMES)
    row = contiguous((256,) * 16, P)

    def correct(costs_of):
        return corrected(costs_of, correction)

    chooses = policy(file, names=("megatron_ts",), correct=correct)
    before = chooses.outcome(1, 4096, LAYERS, row=row).seconds
    correction.set_seconds({"megatron_ts": 2.0})
    chooses.renew()
    assert chooses.outcome(1, 4096, LAYERS, row=row).seconds == pytest.approx(2 * before)


WINDOW = 512


@pytest.fixture(scope="module", params=["all layers", "layer 2"])
def windowed(request, tmp_path_factory):
    """Costs of a model with a window, of rows too where the first layer has it."""
    path = tmp_path_factory.mktemp("windows") / "costs.json"
    everywhere = request.param == "all layers"
    table = table_of(WINDOW, first=everywhere)
    if everywhere:
        table = dataclasses.replace(table, rows=tuple(measured_rows(range(12), WINDOW)))
    write_cost_file(path, table, fit_table(table))
    return read_cost_file(path)


def test_with_a_window_plans_are_the_best_and_prices_near_them(windowed):
    names = ("megatron_ts", "ulysses_z", "megatron_cz", "metp")
    chooses = policy(windowed, names=names)
    priced = prices_by(chooses, windowed.require_model())
    ratios = []
    for row in rows(10, longest=8000):
        load = chooses.rows.load(row)
        exact = dataclasses.replace(
            load_of(row, causal=True, window=WINDOW), seq_length=load.seq_length
        )
        assert exact.within.scores <= load.within.scores <= 1.05 * exact.within.scores + 1
        problem = chooses.problem(LAYERS, 1, load.seq_length, False, load)
        outcome = chooses.outcome(1, row.seq_length, LAYERS, row=row)
        assert outcome.seconds == pytest.approx(best_of_all(problem)[1])
        best = chooses.planner.plan(chooses.problem(LAYERS, 1, exact.seq_length, False, exact))
        ratios.append(priced.seconds(row) / best.seconds)
    assert min(ratios) > 1 - 1e-9
    assert sorted(ratios)[len(ratios) // 2] < 1.01 and max(ratios) < 1.15


def test_a_document_alone_is_priced_as_it_runs_whatever_its_row_would_exchange(windowed):
    """Alone, rings pass all its keys to every rank; in a row, those that queries there see."""
    chooses = policy(windowed, names=("metp",))
    priced = prices_by(chooses, windowed.require_model())
    for s in (1024, 8192):
        row = zigzag((s,), P)
        alone, packed = (chooses.outcome(1, s, LAYERS, row=r).seconds for r in (None, row))
        assert priced.seconds(row) == pytest.approx(alone)
        assert packed <= alone * (1 + 1e-9)


def test_local_z_is_known_where_the_registry_and_others_costs_have_it(file, monkeypatch):
    model = file.require_model()
    monkeypatch.setattr("megatron_paradyse.planner.known.LOCAL", "megatron_ts")
    assert known_for_rows(model)[0] == "megatron_ts"


def wide(lengths, groups=2):
    row = place(lengths, P * groups, causal=True, alignment=2 * P * groups)
    return dataclasses.replace(row, groups=groups)


WIDE_ROWS = [wide((6000,)), wide((3000, 500, 400)), wide((900,) * 9), wide((5000, 60), 4)]


@pytest.mark.parametrize("budget_mib", [4, 20, 1 << 20])
@pytest.mark.parametrize("row", WIDE_ROWS)
def test_wide_rows_are_planned_as_well_as_can_be_by_what_runs_over_groups(row, budget_mib, file):
    chooses = policy(file, budget_mib)
    outcome = chooses.outcome(1, row.group_length, LAYERS, row=row)
    load = chooses.rows.load(row)
    problem = chooses.problem(LAYERS, 1, load.seq_length, False, load)
    fits, seconds, _ = best_of_all(problem)
    assert (outcome.fits, outcome.seconds) == (fits, pytest.approx(seconds))
    offered = {choice.name for layer in problem.layers.values() for choice in layer.attention}
    assert {base_name(name) for name in offered} == set(BASES)
    of_mlp = {choice.name for layer in problem.layers.values() for choice in layer.mlp}
    assert {base_name(name) for name in of_mlp} == set(BASES)
    exact = dataclasses.replace(load_of(row, causal=True), seq_length=load.seq_length)
    best = chooses.planner.plan(chooses.problem(LAYERS, 1, exact.seq_length, False, exact))
    priced = prices(file, budget_mib).seconds(row)
    assert (priced is not None) == best.fits
    assert priced is None or 1 - 1e-9 < priced / best.seconds < 1.15


@pytest.mark.parametrize(("tokens", "groups"), [(139, 4), (495, 3), (4000, 2)])
def test_no_document_over_groups_is_priced_below_its_best_plan(tokens, groups, file):
    """Beside padding it holds more than one that fills all groups; budgets around each plan's."""
    row, names = wide((tokens,), groups), ("megatron_ts", "megatron_ts+recompute")

    def policy_of(budget):
        return policies(file, names).policy(
            Stage(budget_bytes=budget, static_bytes=0), smooth=False
        )

    load = policy_of(1).rows.load(row)
    exact = dataclasses.replace(load_of(row, causal=True), seq_length=load.seq_length)
    every = policy_of(1).problem(LAYERS, 1, exact.seq_length, False, exact)
    peaks = {cost(every, plan)[1] for plan in every_assignment(every)}
    for budget in (share * peak // 100 for peak in peaks for share in (96, 99, 100, 105)):
        chooses = policy_of(budget)
        best = chooses.planner.plan(dataclasses.replace(every, budget_bytes=budget))
        price = prices_by(chooses, file.require_model()).seconds(row)
        assert price is None or (best.fits and price >= best.seconds * (1 - 1e-9))


@pytest.mark.parametrize("lengths", [(200,) * 7, (900,) * 9, (3000, 500, 400)])
def test_a_row_with_room_for_what_sends_less_over_a_slow_link_is_priced_by_it(lengths, file):
    """Rows of the length that hold more have no room for it, and send ten times as much."""
    row = wide(lengths)

    def policies_of(budget):
        settings = Settings(policy="optimal", memory_margin=0.0)
        found = FilePolicies(settings, Costs(file, NAMES, NAMES), 0, wide_bytes_per_second=1e7)
        return found.model, found.policy(Stage(budget_bytes=budget, static_bytes=0), smooth=False)

    least = policies_of(1)[1].outcome(1, row.group_length, LAYERS, row=row).peak_bytes
    for share in (100, 110, 115):
        model, chooses = policies_of(share * least // 100)
        best = best_plan(chooses, row)
        assert best.fits and 1 - 1e-9 < prices_by(chooses, model).seconds(row) / best.seconds < 1.05


def test_a_document_over_two_groups_takes_more_than_half_of_its_time_on_one(file):
    """Half the tokens of a rank, which meet twice the keys; peaks are of half the tokens."""
    chooses = policy(file, names=("megatron_cz",))
    one = chooses.outcome(1, 8192, LAYERS, row=zigzag((8192,), P))
    two = chooses.outcome(1, 4096, LAYERS, row=wide((8192,)))
    half = chooses.outcome(1, 4096, LAYERS, row=zigzag((4096,), P))
    assert half.seconds < two.seconds < one.seconds
    assert half.peak_bytes <= two.peak_bytes < one.peak_bytes


def test_plans_of_wide_rows_do_not_depend_on_what_a_group_ran_before(file):
    """Its replicas must run the same, whatever their own rows were."""
    fresh, used = (
        policies(file, ("local_z", "metp", "megatron_cz"), smoothing=1.0).policy(
            Stage(budget_bytes=1 << 40, static_bytes=0)
        )
        for _ in range(2)
    )
    used.plan(1, 4096, LAYERS, row=contiguous((64,) * 64, P))
    for row in WIDE_ROWS:
        plans = [chooses.plan(1, row.group_length, LAYERS, row=row) for chooses in (fresh, used)]
        assert plans[0] == plans[1]


def test_a_wide_row_of_strategies_that_run_on_one_group_is_refused(file):
    row = wide((1024,))
    with pytest.raises(UserError, match="no strategy of local_z can run attention"):
        policy(file, names=("local_z",)).plan(1, row.group_length, LAYERS, row=row)


@pytest.mark.parametrize(
    "name", ["megatron_cz", "megatron_ts", "megatron_cz+recompute", "megatron_ts+recompute"]
)
def test_what_crosses_slowly_decides(name, file):
    """Keys and values once forward, and backward again, with their gradients: to each rank, or to
    each group once, divided by heads. What recomputes runs the forward twice.
    """
    row, rate = wide((6000,)), 1e6
    found = FilePolicies(
        Settings(policy="optimal", memory_margin=0.0),
        Costs(file, (name,), (name,)),
        0,
        wide_bytes_per_second=rate,
    )
    chooses = found.policy(Stage(budget_bytes=1 << 50, static_bytes=0), smooth=False)
    load, shape = chooses.rows.load(row), file.table.description.model
    token = 2 * shape.num_kv_heads * shape.head_dim * 4  # float32
    keys = load.keys_received if base_name(name) == "megatron_cz" else load.group_keys / P
    slow = keys * (4 if recomputes(name) else 3) * token / rate
    mlp = found.model.operation(name, "mlp", load.seq_length).time_seconds
    outcome = chooses.outcome(1, row.group_length, LAYERS, row=row)
    assert outcome.seconds == pytest.approx(len(LAYERS) * (slow + mlp))
    fast = policy(file, names=(name,)).outcome(1, row.group_length, LAYERS, row=row)
    assert fast.seconds < outcome.seconds / 10
    priced = prices_by(chooses, found.model)
    assert 0.9 * outcome.seconds < priced.seconds(row) <= outcome.seconds
    one = zigzag((3000,), P)
    alone = policy(file, names=(name,)).outcome(1, 3000, LAYERS, row=one)
    assert chooses.outcome(1, 3000, LAYERS, row=one).seconds == alone.seconds
