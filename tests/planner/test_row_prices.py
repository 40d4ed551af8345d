"""Prices of packed rows: at once, and what the best plan takes."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.planner.from_costs import Stage
from megatron_paradyse.settings import Restriction
from tests.costs.synthetic import make_table
from tests.packing.rows import zigzag
from tests.planner.row_policies import (
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


@pytest.mark.parametrize("budget_mib", [8, 32, 1 << 20])
def test_prices_are_not_below_the_best_plan_and_near_it(budget_mib, file):
    chooses, priced = policy(file, budget_mib), prices(file, budget_mib)
    ratios = []
    for row in rows(20, longest=4000):
        seconds = priced.seconds(row)
        best = best_plan(chooses, row)
        assert (seconds is not None) == best.fits
        if seconds is not None:
            ratios.append(seconds / best.seconds)
    assert min(ratios) > 1 - 1e-9
    assert sorted(ratios)[len(ratios) // 2] < 1.01 and max(ratios) < 1.15


def of_gpus(table):
    """The same of devices whose flash kernel takes all documents of a row in one call."""
    hardware = dataclasses.replace(table.description.hardware, kind="cuda")
    changes = {"dtype": "bfloat16", "hardware": hardware}
    return dataclasses.replace(table, description=dataclasses.replace(table.description, **changes))


@pytest.mark.parametrize("size", [4, 16])
def test_no_row_has_a_price_for_which_no_plan_has_room_for_all_its_documents(size, tmp_path):
    """Of each the backward of that call holds 128 rows more than it has tokens."""
    table = of_gpus(make_table(strategies=NAMES))
    write_cost_file(tmp_path / "costs.json", table, fit_table(table))
    file = read_cost_file(tmp_path / "costs.json")
    row = contiguous([size] * (8192 // size), P, alignment=2 * P)

    def without_edges(budget):
        stage = Stage(budget_bytes=budget, static_bytes=0, has_embedding=False, has_head=False)
        return policies(file).policy(stage, smooth=False)

    least = without_edges(1).outcome(1, row.seq_length, LAYERS, row=row).peak_bytes
    for share in (0.9, 0.94, 0.99, 1.05):
        chooses = without_edges(int(share * least))
        outcome = chooses.outcome(1, row.seq_length, LAYERS, row=row)
        priced = prices_by(chooses, file.require_model())
        assert (priced.seconds(row) is not None) == outcome.fits == (share > 1)


def test_a_row_that_fits_has_a_price_though_none_does_of_twice_its_documents(tmp_path):
    """Plans are made for powers of two of documents, and for a few lengths."""
    table = of_gpus(make_table(strategies=NAMES))
    write_cost_file(tmp_path / "costs.json", table, fit_table(table))
    file = read_cost_file(tmp_path / "costs.json")
    row = contiguous([16] * 40 * P, P, alignment=2 * P)

    def policy_of(budget):
        stage = Stage(budget_bytes=budget, static_bytes=0, has_embedding=False, has_head=False)
        return policies(file).policy(stage, smooth=False)

    least = policy_of(1).outcome(1, row.seq_length, LAYERS, row=row).peak_bytes
    for budget, fits in ((least - 1, False), (least, True)):
        chooses = policy_of(budget)
        priced = prices_by(chooses, file.require_model()).seconds(row)
        assert (priced is not None) == chooses.outcome(1, 2560, LAYERS, row=row).fits == fits
    assert priced == pytest.approx(best_plan(chooses, row).seconds, rel=0.01)


def test_prices_count_copies_to_the_host_as_plans_do(tmp_path):
    """One pair allowed at a time, so that the price is of the plan."""
    table = of_gpus(make_table(strategies=("metp", "metp+recompute")))
    constants = dataclasses.replace(table.constants, host_bytes_per_second=5e7)
    table = dataclasses.replace(table, constants=constants)
    write_cost_file(tmp_path / "costs.json", table, fit_table(table))
    file, row, found = read_cost_file(tmp_path / "costs.json"), zigzag((900, 700, 400), P), {}
    names = ("metp", "metp+recompute", "metp+offload")
    plain, again, copied = names
    both = ((copied, copied), (copied, again), (again, copied))
    for pair in (*both, (copied, plain), (plain, copied)):
        only = dict.fromkeys(LAYERS, Restriction(*((name,) for name in pair)))
        chooses = policy(file, names=names, layers=only)
        priced = prices_by(chooses, file.require_model())
        found[pair] = best_plan(chooses, row).seconds
        assert priced.seconds(row) == pytest.approx(found[pair])
    # Where both recompute, the layer's input waits where the attention's does.
    assert found[copied, again] == found[copied, copied] > 1.1 * found[again, copied]


def test_prices_of_what_nothing_fits_are_none(file):
    assert prices(file, 1).seconds(zigzag((1 << 16,), P)) is None


def test_rows_for_which_no_plan_may_be_made_have_no_price(file, monkeypatch):
    """As for one strategy everywhere where none may run on all layers: others are asked."""
    of_rows = prices(file, 1 << 20)

    class Refusing:
        def plan(self, problem):
            raise UserError("none is left")

    monkeypatch.setattr(of_rows._policy, "planner", Refusing())
    assert of_rows.seconds(zigzag((4096,), P)) is None


def test_prices_do_not_depend_on_what_was_asked_before(file):
    asked = list(rows(6))
    forward, back = prices(file, 16), prices(file, 16)
    first = [forward.seconds(row) for row in asked]
    assert first == [back.seconds(row) for row in asked[::-1]][::-1]
