"""Costs of attention on packed rows, from invented laws."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from megatron_paradyse.costs import row_accuracy
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.packed import work_of
from megatron_paradyse.costs.row_accuracy import measure_row_accuracy, row_lines, summarize_rows
from megatron_paradyse.costs.row_costs import RowCosts
from megatron_paradyse.costs.rows import RowMeasurement
from megatron_paradyse.costs.table import ATTENTION, MLP, CostTable
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import Load, load_of, load_of_one
from tests.costs.synthetic import LENGTHS, make_table, measure
from tests.packing.rows import random_row

P = 4
# seconds per score, key, document and peer
FACTORS = {
    "ulysses_z": (5e-10, 0.0, 2e-5, 0.0),
    "megatron_cz": (6e-10, 1e-7, 3e-5, 3e-4),
    "colossal_z": (3e-10, 1e-7, 3e-5, 3e-4),
}
LONG = 1 << 17


def a_load(seed: int = 0, *, longest: int = LONG):
    return load_of(random_row(random.Random(seed), P, longest=longest), causal=True)


def measured_rows(seeds, *, noise: float = 0.0, strategies=tuple(FACTORS)):
    """Of the factors above, forward 1 part and backward 2."""
    rng = np.random.default_rng(0)
    rows = []
    for seed in seeds:
        load = a_load(seed, longest=4096)
        for name in strategies:
            one = measure(name, ATTENTION, load.seq_length)
            work = zip(
                work_of(name, load),
                work_of(name, load_of_one(load.seq_length, P, causal=True)),
                FACTORS[name],
                strict=True,
            )
            more = sum((a - b) * factor for a, b, factor in work)
            noisy = np.exp(noise * rng.standard_normal())
            times = ((one.forward_seconds + more / 3) * noisy, one.backward_seconds + 2 * more / 3)
            if min(times) > 0:
                sizes = (one.kept_bytes, one.forward_bytes, one.backward_bytes)
                rows.append(RowMeasurement(name, load, "ok", *map(float, times), *sizes))
    return rows


@pytest.fixture(scope="module")
def table():
    return make_table()


@pytest.fixture(scope="module")
def derived(table):
    return fit_table(table)


@pytest.fixture(scope="module")
def fitted(table):
    return fit_table(dataclasses.replace(table, rows=tuple(measured_rows(range(12)))))


@pytest.mark.parametrize("which", ["derived", "fitted"])
@pytest.mark.parametrize("kind", ["hybrid", "paper"])
def test_a_row_of_one_document_costs_what_the_document_costs(which, kind, table, request):
    """Exactly, but for workspace: exchanges that follow documents hold a little more."""
    model = request.getfixturevalue(which) if kind == "hybrid" else fit_table(table, kind)
    costs = RowCosts(model, load_of_one(2048, P, causal=True))
    for operation in (ATTENTION, MLP):
        for name in model.strategies(operation):
            packed, one = costs(name, operation, 2048), model.operation(name, operation, 2048)
            more = dataclasses.replace(
                packed, forward_bytes=one.forward_bytes, backward_bytes=one.backward_bytes
            )
            assert more == one
            assert packed.forward_bytes >= one.forward_bytes
            assert packed.backward_bytes >= one.backward_bytes


@pytest.mark.parametrize("which", ["derived", "fitted"])
def test_more_of_anything_is_not_cheaper(which, request):
    model = request.getfixturevalue(which)
    for seed in range(20):
        load = a_load(seed)
        less = RowCosts(model, load)
        for field in ("scores", "fullest_scores", "keys_received", "documents"):
            more = RowCosts(
                model, dataclasses.replace(load, **{field: getattr(load, field) * 2 + 1})
            )
            for name in model.strategies(ATTENTION):
                one, two = (
                    costs(name, ATTENTION, load.seq_length).time_seconds for costs in (less, more)
                )
                assert two >= one > 0


def test_without_rows_pairs_of_tokens_shrink_and_nothing_else(derived):
    """The law of these documents is known: overhead and tokens stay, pairs are those of the row."""
    load = a_load(3)
    s = load.seq_length
    share = load.scores / load_of_one(s, P, causal=True).scores
    expected = 2e-3 * (1 + 1 / 3) + 2e-6 * (1 - 1 / 20) * s + share * 1.5e-10 * (1 + 1 / 15) * s * s
    found = RowCosts(derived, load)("ulysses_z", ATTENTION, s).time_seconds
    assert share < 0.5
    assert found == pytest.approx(expected, rel=0.02)


def test_strategies_that_split_heads_do_not_see_uneven_ranks(derived):
    load = a_load(1)
    uneven = dataclasses.replace(load, fullest_scores=load.scores)
    for name, sees in (("ulysses_z", False), ("megatron_ts", False), ("megatron_cz", True)):
        one, two = (
            RowCosts(derived, each)(name, ATTENTION, load.seq_length).time_seconds
            for each in (load, uneven)
        )
        assert (two > one) == sees


def test_work_is_what_a_rank_does_for_the_documents_it_holds():
    load = Load(64, P, 400, 150, keys_received=20, documents=6, fullest_documents=3, peers=2)
    assert work_of("ulysses_z+recompute", load) == (400 / P, 0, 6, 0)
    assert work_of("megatron_cz", load) == work_of("metp", load) == (150, 20, 3, 2)
    # score rows: a column for each of the rank's own keys and of those that come
    assert work_of("colossal_z", load) == (16 * (16 + 20), 20, 3, 2)


def test_each_rank_of_split_heads_gets_whole_heads_of_keys(derived):
    """Two key heads among four ranks are sent as four; gradients, in float32, go back besides."""
    sizes = dataclasses.replace(derived.packed.sizes, g=2, element_bytes=2)
    packed = dataclasses.replace(derived.packed, sizes=sizes, wide_bytes_per_second=10.0)
    load = dataclasses.replace(a_load(), keys_received=100, group_keys=80, groups=2)
    for name, keys, heads in (
        ("megatron_cz", 100, 2),
        ("metp", 100, 4),
        ("ulysses_z", 80, 4 / P),
    ):
        sent = keys * 2 * heads * sizes.d * 2
        assert packed.crossing_seconds(name, load) == (sent / 10, (sent + 2 * sent) / 10)


def test_factors_are_found_again_in_rows_that_were_not_fitted(fitted, table):
    noisy = dataclasses.replace(table, rows=tuple(measured_rows(range(20), noise=0.05)))
    for model, most in ((fitted, 0.02), (fit_table(noisy), 0.10)):
        errors = []
        for m in measured_rows(range(100, 120)):
            found = RowCosts(model, m.load)(m.strategy, ATTENTION, m.load.seq_length)
            errors.append(abs(found.time_seconds / m.time_seconds - 1))
        assert np.median(errors) < most


def test_recomputing_takes_in_proportion_what_the_same_without_takes(fitted):
    """Its backward runs the forward again; differences alone would let it win by noise."""
    load = a_load(5, longest=4096)
    s = load.seq_length
    costs = RowCosts(fitted, load)
    names = ("megatron_cz", "megatron_cz+recompute")
    (row, one), (row_again, one_again) = (
        (costs(name, ATTENTION, s), fitted.operation(name, ATTENTION, s)) for name in names
    )
    assert row.time_seconds < 0.9 * one.time_seconds
    assert row_again.forward_seconds / one_again.forward_seconds == pytest.approx(
        row.forward_seconds / one.forward_seconds
    )
    assert row_again.backward_seconds / one_again.backward_seconds == pytest.approx(
        row.time_seconds / one.time_seconds
    )


def test_local_z_costs_no_more_than_what_exchanges_besides(derived):
    load = dataclasses.replace(a_load(2), keys_received=0, peers=0)
    s, costs = load.seq_length, RowCosts(derived, load)
    for suffix in ("", "+recompute"):
        local = costs("local_z" + suffix, ATTENTION, s).time_seconds
        others = [costs(n + suffix, ATTENTION, s) for n in ("megatron_cz", "ulysses_z")]
        assert local <= max(other.time_seconds for other in others)
        assert costs("local_z" + suffix, MLP, s) == costs("megatron_cz" + suffix, MLP, s)
        alone = RowCosts(derived, load_of_one(s, P, causal=True))
        faster = min(
            derived.operation(n + suffix, ATTENTION, s).time_seconds
            for n in ("megatron_cz", "ulysses_z")
        )
        assert alone("local_z" + suffix, ATTENTION, s).time_seconds == pytest.approx(faster)


def test_rows_of_local_z_are_fitted_though_it_runs_no_single_document(table):
    rows = [dataclasses.replace(m, strategy="local_z") for m in measured_rows(range(8))]
    rows = [
        dataclasses.replace(m, load=dataclasses.replace(m.load, keys_received=0, peers=0))
        for m in rows
    ]
    model = fit_table(dataclasses.replace(table, rows=tuple(rows)))
    assert model.packed.fits["local_z"].like == "megatron_cz"


def test_nothing_tells_of_local_z_where_no_strategy_gathers_weights():
    model = fit_table(make_table(strategies=("megatron_ts", "metp")))
    load = a_load(1)
    with pytest.raises(UserError, match="no costs of the attention of local_z"):
        RowCosts(model, load)("local_z", ATTENTION, load.seq_length)


def test_score_rows_have_columns_for_the_keys_that_come(derived):
    """Probabilities are kept; scores, in the accumulation dtype, are beside them in the peaks."""
    s = 8192
    one = load_of_one(s, P, causal=True)
    half = dataclasses.replace(one, keys_received=one.keys_received - s // 2)
    found = [RowCosts(derived, load)("colossal_z", ATTENTION, s) for load in (one, half)]
    saved = found[0].kept_bytes - found[1].kept_bytes
    z = derived.packed.sizes
    scores = s // P * z.n * (s // 2)
    assert saved == scores * z.element_bytes  # float32: scores become probabilities in place
    assert found[0].backward_bytes - found[1].backward_bytes > scores * z.wide_bytes
    assert found[0].forward_bytes > found[1].forward_bytes


def test_a_file_with_rows_is_read_as_it_was_written(tmp_path, table):
    full = dataclasses.replace(table, rows=tuple(measured_rows(range(8), noise=0.05)))
    model = fit_table(full)
    write_cost_file(tmp_path / "costs.json", full, model)
    read = read_cost_file(tmp_path / "costs.json")
    assert read.table.rows == full.rows
    assert read.model.packed == model.packed and set(model.packed.fits) == set(FACTORS)


def test_a_file_without_rows_is_the_same_as_before(tmp_path, table):
    write_cost_file(tmp_path / "costs.json", table, fit_table(table))
    values = json.loads((tmp_path / "costs.json").read_text())
    assert "rows" not in values and "packed" not in values["model"]
    assert read_cost_file(tmp_path / "costs.json").model.packed.fits == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v["rows"][0]["load"].update(p=8), r"rows\[0\]\.load\.p"),
        (lambda v: v["rows"][0]["load"].update(scores=-1), r"rows\[0\]\.load\.scores"),
        (lambda v: v["rows"][0]["load"].pop("documents"), r"rows\[0\]\.load lacks 'documents'"),
        (lambda v: v["rows"][0].update(forward_seconds="1"), r"rows\[0\]\.forward_seconds"),
        (lambda v: v["rows"].pop(), r"model\.packed\[\d\] was not fitted"),
        (lambda v: v["model"]["packed"][0].update(forward=[-1, 0, 0, 0]), r"packed\[0\]\.forward"),
        (lambda v: v["model"]["packed"][0].update(like="nobody"), r"packed\[0\] was not fitted"),
    ],
)
def test_what_is_wrong_with_rows_of_a_file_is_said_in_one_line(change, says, tmp_path, table):
    full = dataclasses.replace(table, rows=tuple(measured_rows(range(8))))
    path = tmp_path / "costs.json"
    write_cost_file(path, full, fit_table(full))
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=says) as error:
        read_cost_file(path)
    assert "\n" not in str(error.value)


def test_a_table_without_some_measurements_keeps_its_rows(table):
    full = dataclasses.replace(table, rows=tuple(measured_rows(range(4))))
    fewer = full.only(lambda m: m.strategy == "ulysses_z")
    assert isinstance(fewer, CostTable) and fewer.rows == full.rows


@pytest.fixture(scope="module")
def small():
    """Three strategies' attention at five lengths."""
    return make_table(LENGTHS[::2], tuple(FACTORS), (ATTENTION,), model_parts=False)


def test_accuracy_leaves_rows_out_and_finds_the_noise(small):
    full = dataclasses.replace(small, rows=tuple(measured_rows(range(10), noise=0.05)))
    found = summarize_rows(measure_row_accuracy(full))
    assert found["fitted"]["rows"] == found["derived"]["rows"] == len(full.rows)
    assert 0.01 < found["fitted"]["time_median"] < 0.08 < found["derived"]["time_median"]
    assert measure_row_accuracy(small) == []


def test_accuracy_for_rows_of_another_profile_fits_once_and_tells_what_was_fitted(
    small, monkeypatch
):
    """Only of strategies that have factors, and of rows that these were not fitted to."""
    names = ("ulysses_z", "megatron_cz")
    table = dataclasses.replace(small, rows=tuple(measured_rows(range(6), strategies=names)))
    held_out = dataclasses.replace(small, rows=tuple(measured_rows(range(4, 9))))
    fits = []
    monkeypatch.setattr(row_accuracy, "fit_table", lambda of: fits.append(of) or fit_table(of))
    errors = measure_row_accuracy(table, held_out)
    assert fits == [dataclasses.replace(table, rows=()), table]
    fitted = [error for error in errors if error.form == "fitted"]
    seen = {(m.strategy, m.load) for m in table.rows}
    new = [m for m in held_out.rows if m.strategy in names and (m.strategy, m.load) not in seen]
    assert [(e.strategy, e.seq_length) for e in fitted] == [
        (m.strategy, m.load.seq_length) for m in new
    ]
    assert len(errors) - len(fitted) == len(held_out.rows) > len(new) > 0
    assert max(error.time for error in fitted) < 0.05


def test_accuracy_names_the_row_whose_bytes_are_most_wrong(small):
    rows = measured_rows(range(6))
    wrong = next(i for i, row in enumerate(rows) if row.strategy == "ulysses_z")
    peak = dataclasses.replace(rows[wrong], kept_bytes=1e12)
    full = dataclasses.replace(small, rows=(*rows[:wrong], peak, *rows[wrong + 1 :]))
    load, errors = peak.load, measure_row_accuracy(full)
    name = f"ulysses_z, {load.seq_length} tokens, {load.documents} documents"
    for form, found in summarize_rows(errors).items():
        assert found["peak_least_of"] == found["kept_max_of"] == name
        (of_row,) = (e for e in errors if e.form == form and e.peak_bytes == found["peak_least"])
        assert of_row.peak_bytes == pytest.approx(-1, abs=0.01)
        assert found["kept_max"] == of_row.kept_bytes == pytest.approx(1, abs=0.01)
    assert all(name in line for line in row_lines(errors) if line.startswith("packed rows"))


def test_the_command_says_how_wrong_rows_are(tmp_path, small):
    full = dataclasses.replace(small, rows=tuple(measured_rows(range(6))))
    write_cost_file(tmp_path / "costs.json", full)
    arguments = ["accuracy", str(tmp_path / "costs.json")]
    text = CliRunner().invoke(cli, arguments).output
    assert "packed rows, fitted" in text and "packed rows, derived" in text
    values = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).output)
    assert values["packed_rows"]["fitted"]["time_median"] < 0.05
