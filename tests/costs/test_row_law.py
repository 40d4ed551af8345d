"""Seconds above one document's: what is computed, and the floor of launches."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.hybrid import HybridFit
from megatron_paradyse.costs.laws import Law
from megatron_paradyse.costs.packed import LEAST_SHARE, PackedFit, least_share, work_of
from megatron_paradyse.costs.row_costs import RowCosts
from megatron_paradyse.costs.row_law import RowLaw, RowPoints, fit_row_law
from megatron_paradyse.costs.rows import RowMeasurement
from megatron_paradyse.costs.table import ATTENTION
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import load_of, load_of_one
from megatron_paradyse.packing.row import contiguous
from tests.costs.synthetic import make_table, measure
from tests.packing.rows import random_row

P = 4
LAW = RowLaw((2e-10, 3e-8, 0.0, 0.0), (3e-4, 2e-8, 2e-4, 1e-4))


def loads(count: int):
    """Of documents of at most 256 tokens to 8K."""
    return [
        load_of(random_row(random.Random(i), P, longest=256 << i % 6), causal=True)
        for i in range(count)
    ]


def one_document(s: int) -> float:
    """Seconds: launches, tokens and pairs; below and above the floor's of LAW."""
    return 5e-4 + 1e-7 * s + 5e-11 * s * s


def points_of(law: RowLaw, given) -> RowPoints:
    rows = []
    for load in given:
        work = work_of("megatron_cz", load)
        of_one = work_of("megatron_cz", load_of_one(load.seq_length, P, causal=True))
        one = one_document(load.seq_length)
        rows.append((one + law.excess(one, load.seq_length, work, of_one), one, load, work, of_one))
    measured, one, which, work, of_one = zip(*rows, strict=True)
    s = [float(load.seq_length) for load in which]
    return RowPoints(*map(np.array, (measured, one, s, work, of_one)))


@pytest.mark.parametrize("s", [8, 512, 1 << 17])
@pytest.mark.parametrize("floor", [(0.0,) * 4, (1.0, 0.0, 1.0, 1.0)])
def test_one_document_costs_what_it_costs(s, floor):
    """Even where the floor lies above it."""
    work = work_of("megatron_cz", load_of_one(s, P, causal=True))
    assert RowLaw(LAW.factors, floor).excess(one_document(s), s, work, work) == 0


@pytest.mark.parametrize("which", ["derived", "fitted"])
def test_many_short_documents_take_what_their_tokens_and_pairs_do_in_the_longest_rows(which):
    """Here 1% of one document of the row's tokens, which is pairs but for 0.6%."""
    s, documents = 1 << 21, 256
    per_pair = 1.5e-10 * (1 + 1 / 15)  # of the law of these documents
    load = load_of(contiguous([s // documents] * documents, P, alignment=s), causal=True)
    alone = load_of_one(s, P, causal=True)
    one = measure("ulysses_z", ATTENTION, s).time_seconds
    expected = one - per_pair * s * s * (1 - load.scores / alone.scores)
    model = fit_table(make_table())
    if which == "fitted":
        per_score = per_pair * s * s / (alone.scores / P)
        laws = (RowLaw((share * per_score, 0.0, 0.0, 0.0)) for share in (0.4, 0.6))
        fits = {"ulysses_z": PackedFit("ulysses_z", "ulysses_z", 4, *laws)}
        model = model.with_rows(dataclasses.replace(model.packed, fits=fits))
    found = RowCosts(model, load)("ulysses_z", ATTENTION, s).time_seconds
    assert expected < 0.012 * one
    assert found == pytest.approx(expected, rel=0.02)


def test_rows_take_a_share_of_one_document_where_no_law_tells_what_tokens_take():
    s, pairs = 1 << 20, (0.0, 0.0, 0.0, 2e-10)
    alike, split = Law((pairs,)), Law((pairs, (0.0, 0.0, 1e-6, 1e-10)))
    for law in (alike, replace(split, beyond=alike, bend=s / 2)):
        assert least_share(HybridFit(law), s) == LEAST_SHARE
    assert least_share(HybridFit(split), s) == pytest.approx(1e-6 / (2e-10 * s))
    faster = Law(((0.0, 0.0, 1e-6, 2e-10),))
    for law in (faster, Law((*faster.pieces, pairs)), replace(alike, beyond=faster, bend=s / 2)):
        assert least_share(HybridFit(law), s) == pytest.approx(1e-6 / (1e-6 + 2e-10 * s))
    assert least_share(HybridFit(faster), 1024) == LEAST_SHARE


def test_documents_without_work_cost_their_launches():
    one, s = 1e-3, 1024
    of_one = (s * (s + 1) / 8, 3 * s / 4, 1, 3)
    few, many = ((0.0, 0.0, documents, 0.0) for documents in (20, 44))
    found = [one + LAW.excess(one, s, work, of_one) for work in (few, many)]
    assert found[1] - found[0] == pytest.approx(24 * 2e-4)
    # Peers that it does without are launches that it does without.
    least = 3e-4 + 2e-8 * s + 2e-4 + 3 * 1e-4
    assert found[0] == pytest.approx(least + 19 * 2e-4 - 3 * 1e-4)


def test_the_law_is_found_again():
    known = points_of(LAW, loads(24))
    law = fit_row_law(known)
    assert any(law.floor)
    asked = loads(60)[24:]
    truth = points_of(LAW, asked)
    found = points_of(law, asked)
    errors = np.abs(found.measured / truth.measured - 1)
    assert np.median(errors) < 0.01 and errors.max() < 0.2
    # Without a floor the same rows cannot be told.
    flat = points_of(RowLaw(law.factors), asked)
    assert np.mean(np.abs(flat.measured / truth.measured - 1)) > 0.1


def test_no_floor_is_made_up():
    truth = RowLaw((4e-11, 2e-9, 3e-6, 1e-5))
    law = fit_row_law(points_of(truth, loads(16)))
    assert not any(law.floor)
    found, expected = (points_of(each, loads(40)).measured for each in (law, truth))
    assert np.abs(found / expected - 1).max() < 0.05  # terms that nobody would notice are left out


@pytest.fixture(scope="module")
def table():
    rows = []
    for load in loads(16):
        one = measure("megatron_cz", ATTENTION, load.seq_length)
        work = work_of("megatron_cz", load)
        of_one = work_of("megatron_cz", load_of_one(load.seq_length, P, causal=True))
        floor = RowLaw((0.0,) * 4, (0.0, 0.0, 2e-3, 0.0))
        times = [
            seconds + floor.excess(seconds, load.seq_length, work, of_one)
            for seconds in (one.forward_seconds, one.backward_seconds)
        ]
        sizes = (one.kept_bytes, one.forward_bytes, one.backward_bytes)
        rows.append(RowMeasurement("megatron_cz", load, "ok", *map(float, times), *sizes))
    return dataclasses.replace(make_table(), rows=tuple(rows))


@pytest.mark.parametrize("count", [3, 4])
def test_four_rows_of_a_strategy_are_fitted_and_three_are_not(count, table):
    fits = fit_table(replace(table, rows=table.rows[:count])).packed.fits
    assert [fit.num_rows for fit in fits.values()] == ([4] if count == 4 else [])


def test_rows_that_ran_out_of_memory_are_kept_in_cost_files_and_not_fitted(table, tmp_path):
    lost = RowMeasurement("megatron_cz", table.rows[0].load, "oom")
    more = replace(table, rows=(*table.rows, lost))
    write_cost_file(tmp_path / "costs.json", more, fit_table(more))
    file = read_cost_file(tmp_path / "costs.json")
    assert file.table.rows[-1] == lost
    assert file.require_model().packed.fits["megatron_cz"].num_rows == len(table.rows)


def test_floors_are_kept_in_cost_files(table, tmp_path):
    model = fit_table(table)
    assert any(model.packed.fits["megatron_cz"].forward.floor)
    path = tmp_path / "costs.json"
    write_cost_file(path, table, model)
    assert read_cost_file(path).model.packed == model.packed
    values = json.loads(path.read_text())
    for item in values["model"]["packed"]:
        del item["forward_floor"], item["backward_floor"]
    path.write_text(json.dumps(values))
    older = read_cost_file(path).model.packed.fits["megatron_cz"]
    assert older.forward == RowLaw(model.packed.fits["megatron_cz"].forward.factors)


@pytest.mark.parametrize("floor", [[-1, 0, 0, 0], [0, 0, 0], "x", None])
def test_a_floor_that_is_none_is_refused(floor, table, tmp_path):
    path = tmp_path / "costs.json"
    write_cost_file(path, table, fit_table(table))
    values = json.loads(path.read_text())
    values["model"]["packed"][0]["backward_floor"] = floor
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match="backward_floor"):
        read_cost_file(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("fine",), "status is none of ok, oom, unsupported"),
        (("ok", 1.0, 1.0, -5.0), "kept_bytes must lie in"),
        (("ok", 1.0, float("nan")), "backward_seconds must lie in"),
        (("ok", float("inf")), "forward_seconds must lie in"),
        (("ok",), "forward_seconds must be above 0"),
    ],
)
def test_impossible_measurements_of_rows_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        RowMeasurement("metp", load_of_one(64, P, causal=True), *values)
