"""Packed rows in a profile of a small model on 2 ranks, with real collectives."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.layers import half_of
from megatron_paradyse.costs.row_costs import RowCosts
from megatron_paradyse.costs.rows import RowMeasurement
from megatron_paradyse.costs.table import ATTENTION, MLP, CostTable
from megatron_paradyse.packing.load import load_of
from megatron_paradyse.packing.placement import place
from megatron_paradyse.profiler.journal import Journal
from megatron_paradyse.profiler.row_points import point_of_key, row_points, rows_of
from megatron_paradyse.strategies.row_sizes import RowSizes
from tests.costs.synthetic import CONSTANTS, DESCRIPTION
from tests.profiler.profiling import LATENT, ROPE, run_profile

LENGTHS = (64, 128, 256)
NAMES = ("megatron_cz", "ulysses_z", "megatron_ts")

WINDOW = 24
MODELS = {
    "no window": {},
    "windows": {"--window-size": f"{WINDOW - 1},0"},
    "windows in others": {
        "--window-size": f"{WINDOW - 1},0",
        "--window-attn-skip-freq": "[0,1,0,1,0,1]",
    },
    "RoPE": ROPE,
    "gates": {
        **ROPE,
        "--attention-output-gate": "",
        "--group-query-attention": "",
        "--num-query-groups": 2,
    },
    "latents": {**LATENT, "--disable-bias-linear": ""},
}


@pytest.fixture(scope="module", params=MODELS)
def profiled(request, tmp_path_factory):
    """A cost file, and the events of the run that wrote it and of one more."""
    output = tmp_path_factory.mktemp("rows") / "costs.json"
    options = {"lengths": LENGTHS, "strategies": NAMES, "packed": True, "quick": True}
    runs = [run_profile(output, model=MODELS[request.param], **options)[1] for _ in range(2)]
    return read_cost_file(output).table, runs


def test_rows_of_every_base_strategy_and_of_local_z_are_measured_once(profiled):
    table, (first, second) = profiled
    wanted = list(row_points(dict.fromkeys(LENGTHS, True), NAMES, table.description))
    found = {(m.strategy, m.load): m for m in table.rows}
    assert found.keys() == {(point.strategy, point.load) for point in wanted}
    assert {m.strategy for m in table.rows} == {
        "megatron_cz",
        "ulysses_z",
        "megatron_ts",
        "local_z",
    }
    assert all(m.is_ok for m in table.rows)
    again = [(e["strategy"], half_of(e["operation"])) for e in first if e.get("resumed")]
    assert {*again} == {("ulysses_z", MLP)}, "as measured of megatron_cz"
    assert all(event["resumed"] for event in second if "resumed" in event)


def test_measured_bytes_are_within_the_predicted_ones_and_kept_bytes_are_them(profiled):
    table, _ = profiled
    model = fit_table(table)
    for m in table.rows:
        costs = RowCosts(model, m.load)(m.strategy, ATTENTION, m.load.seq_length)
        assert costs.kept_bytes == pytest.approx(m.kept_bytes, rel=0.02), m
        for name in ("forward_bytes", "backward_bytes"):
            found = costs.kept_bytes + getattr(costs, name)
            assert found >= 0.98 * (m.kept_bytes + getattr(m, name)), (name, m)


def test_rows_have_a_length_are_unlike_and_found_by_their_number():
    description = dataclasses.replace(DESCRIPTION, p=8)
    rows = rows_of(4096, description)
    assert {row.seq_length for row in rows} == {4096} and len(set(rows)) == len(rows) == 4
    loads = [load_of(row, causal=True) for row in rows]
    assert {load.crosses for load in loads} == {True, False}
    for point in row_points({4096: True}, ("metp",), description):
        assert point_of_key(point.key, description) == point
    assert point_of_key(("metp", "attention", 4096, 1), description) is None


def test_local_z_has_the_rows_whose_documents_stay_and_lengths_are_every_other_timed_one():
    description = dataclasses.replace(DESCRIPTION, p=8)
    lengths = {1 << i: True for i in range(9, 16)} | {1 << 16: False}
    points = list(row_points(lengths, ("metp", "metp+recompute"), description))
    assert list(dict.fromkeys(p.seq_length for p in points)) == [1 << 11, 1 << 13, 1 << 15]
    rows = [p.row for p in points if p.strategy == "metp"]
    staying = [p.row for p in points if p.strategy == "local_z"]
    assert staying == [row for row in rows if not load_of(row, causal=True).crosses]
    assert 0 < len(staying) < len(rows) and len(points) == len(rows) + len(staying)


@pytest.mark.parametrize("everywhere", [True, False])
def test_rows_are_placed_by_the_window_that_all_layers_have_and_count_any(everywhere):
    others = {} if everywhere else {"attention@2": (2,)}
    halves = {name: {"window": WINDOW} for name in others} or {"attention": {"window": WINDOW}}
    description = dataclasses.replace(DESCRIPTION, p=8, other_layers=others, halves=halves)
    window = WINDOW if everywhere else None
    for point in row_points({4096: True}, ("metp",), description):
        again = place(point.row.lengths, 8, causal=True, alignment=4096, window=window)
        assert again == point.row
        assert point.load == load_of(point.row, causal=True, window=WINDOW)
        assert point_of_key(point.key, description) == point


@pytest.mark.parametrize("told", [None, RowSizes(longest=128, piece=128, held=128, pieces=1)])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_profile_goes_on_with_rows_of_versions_that_told_less_of_buffers(tmp_path, told, window):
    """Measured once: a row that is not found would be there twice."""
    halves = {"attention": {"window": window}} if window else {}
    d = dataclasses.replace(DESCRIPTION, halves=halves)
    points = list(row_points({256: True}, NAMES, d))
    rows = []
    for i, point in enumerate(points, 1):
        within = point.load.within and dataclasses.replace(point.load.within, buffers=told)
        load = dataclasses.replace(point.load, buffers=told, within=within)
        rows.append(RowMeasurement(point.strategy, load, "ok", float(i), float(i)))
    path = tmp_path / "costs.json"
    write_cost_file(path, CostTable(d, (), CONSTANTS, tuple(rows)))
    journal = Journal(path, d)
    journal.complete(CONSTANTS)
    found = [journal.found(point) for point in points]
    journal.save()
    assert [m and m.forward_seconds for m in found] == [m.forward_seconds for m in rows]
    again = read_cost_file(path).table.rows
    assert [(m.strategy, m.load) for m in again] == [(p.strategy, p.load) for p in points]
    assert list(again) == found
