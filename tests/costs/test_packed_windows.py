"""Costs of packed rows where a query sees a window of keys, from invented laws."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.packed import work_of
from megatron_paradyse.costs.row_costs import Counted, RowCosts, RowTerms
from megatron_paradyse.costs.row_law import RowLaw
from megatron_paradyse.costs.rows import RowMeasurement
from megatron_paradyse.costs.table import ATTENTION, OperationCosts
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import load_of, load_of_one
from tests.costs.synthetic import DESCRIPTION, law, make_table, measure
from tests.packing.rows import random_row, zigzag

P = 4
SECOND = "attention@2"  # of layers 2 and 4
# seconds per score, key, document and peer
FACTORS = {
    "ulysses_z": (5e-8, 0.0, 2e-5, 0.0),
    "megatron_cz": (6e-8, 1e-7, 3e-5, 3e-4),
    "metp": (4e-8, 2e-7, 1e-5, 2e-4),
}
NAMES = (*FACTORS, "megatron_ts", "colossal_z")
WINDOWS = (None, 100, 512, 4096)


def seconds_of(strategy: str, s: int, pairs: float) -> float:
    """The table's law with so many pairs in the place of s^2, each 50 times as dear."""
    seconds, n = law(strategy, ATTENTION)[0], 1 << 20
    per_pair = (seconds(2 * n, 1) - 2 * seconds(n, 1) + seconds(0, 1)) / (2 * n * n)
    return seconds(s, 1) + per_pair * (50 * pairs - s * s)


def pairs_of(s: int, window: int | None) -> int:
    return s * s - max(s - window, 0) ** 2 if window else s * s


def table_of(window: int | None, *, first: bool = True, hides: tuple[str, ...] = ()):
    """Attention with that window in all layers, or with first=False in layers 2 and 4 alone.

    hides: strategies that compute every score of a document, and hide those beyond the window.
    """
    windowed = {"window": window} if window else {}
    names = (ATTENTION,) if first else (ATTENTION, SECOND)
    halves = {name: windowed if name == names[-1] else {} for name in names} | {"mlp": {}}
    others = {} if first else {SECOND: (2, 4)}
    points = []
    for m in make_table(strategies=NAMES).measurements:
        for name in names if m.operation == ATTENTION else (m.operation,):
            keys = window if name == names[-1] and m.strategy not in hides else None
            seconds = seconds_of(m.strategy, m.seq_length, pairs_of(m.seq_length, keys))
            if m.operation == ATTENTION and m.strategy != "colossal_z":
                times = {"forward_seconds": 0.4 * seconds, "backward_seconds": 0.6 * seconds}
                m = dataclasses.replace(m, **times)
            points.append(dataclasses.replace(m, operation=name))
    description = dataclasses.replace(DESCRIPTION, halves=halves, other_layers=others)
    table = make_table(strategies=NAMES)
    return dataclasses.replace(table, description=description, measurements=tuple(points))


def a_load(seed: int, window: int | None, *, longest: int = 1 << 15):
    return load_of(random_row(random.Random(seed), P, longest=longest), causal=True, window=window)


def measured_rows(seeds, window: int | None):
    """Of the factors above, which count what the window leaves."""
    rows = []
    for seed in seeds:
        load = a_load(seed, window)
        one = load_of_one(load.seq_length, P, causal=True, window=window)
        for name, factors in FACTORS.items():
            bytes_ = measure(name, ATTENTION, load.seq_length)
            alone = seconds_of(name, load.seq_length, pairs_of(load.seq_length, window))
            work, of_one = (work_of(name, each.seen(window is not None)) for each in (load, one))
            excess = sum((a - b) * c for a, b, c in zip(work, of_one, factors, strict=True))
            times = (0.4 * alone + excess / 3, 0.6 * alone + 2 * excess / 3)
            if min(times) > 0:
                sizes = (bytes_.kept_bytes, bytes_.forward_bytes, bytes_.backward_bytes)
                rows.append(RowMeasurement(name, load, "ok", *map(float, (*times, *sizes))))
    return rows


def found(model, name: str, load, operation: str = ATTENTION) -> float:
    return RowCosts(model, load)(name, operation, load.seq_length).time_seconds


def test_a_forward_may_count_the_window_where_its_backward_does_not():
    """Each of two laws of 1 s a score has its own scores, and one document's likewise."""
    load, one = a_load(3, 100), load_of_one(4096, P, causal=True, window=100)
    scores = RowLaw((1.0, 0.0, 0.0, 0.0))
    alone = OperationCosts(1e9, 2e9, 0, 0, 0)
    for windowed in itertools.product((True, False), repeat=2):
        laws = [Counted(scores, w, work_of("metp", one.seen(w)), 0.0) for w in windowed]
        found = RowTerms("metp", "metp", alone, *laws, alone, lambda load: (0.0, 0.0))
        more = [load.seen(w).fullest_scores - one.seen(w).fullest_scores for w in windowed]
        assert found.seconds(load) == (1e9 + more[0], 2e9 + more[1])


@pytest.mark.parametrize("window", WINDOWS)
def test_derived_rows_take_the_pairs_of_their_documents_within_the_window(window):
    """Of what splits heads as the sum over documents; of what does not as the fullest rank."""
    model = fit_table(table_of(window))
    for seed in range(12):
        row = random_row(random.Random(seed), P, longest=1 << 14)
        load = load_of(row, causal=True, window=window)
        s, seen = row.seq_length, load.seen(window is not None)
        pairs = sum(pairs_of(length, window) for length in row.lengths)
        expected = seconds_of("ulysses_z", s, pairs)
        assert found(model, "ulysses_z", load) == pytest.approx(expected, rel=0.01)
        one = load_of_one(s, P, causal=True, window=window).seen(window is not None)
        fullest = pairs_of(s, window) * seen.fullest_scores / one.fullest_scores
        expected = seconds_of("megatron_cz", s, fullest)
        assert found(model, "megatron_cz", load) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("window", WINDOWS)
def test_laws_of_rows_are_found_again_in_rows_that_were_not_fitted(window):
    table = table_of(window)
    model = fit_table(dataclasses.replace(table, rows=tuple(measured_rows(range(16), window))))
    assert set(model.packed.fits) == set(FACTORS)
    errors = [
        abs(found(model, m.strategy, m.load) / m.time_seconds - 1)
        for m in measured_rows(range(100, 130), window)
    ]
    assert max(errors) < 0.02


def test_layers_with_the_window_count_within_it_and_layers_without_count_all():
    """Rows were measured of the first layer, which has none: its laws are those without windows."""
    window = 512
    table = table_of(window, first=False)
    load, plain = a_load(4, window), a_load(4, None)
    derived, without = fit_table(table), fit_table(table_of(None))
    assert found(derived, "metp", load) == found(without, "metp", plain)
    alone = fit_table(table_of(window))
    for name in NAMES:
        assert found(derived, name, load, SECOND) == found(alone, name, load)
    assert found(derived, "metp", load, SECOND) < 0.8 * found(derived, "metp", load)
    rows = measured_rows(range(8), None)
    both = [
        dataclasses.replace(m, load=a_load(seed, window))
        for seed in range(8)
        for m in rows
        if m.load == a_load(seed, None)
    ]
    fitted = fit_table(dataclasses.replace(table, rows=tuple(both)))
    expected = fit_table(dataclasses.replace(table_of(None), rows=tuple(rows)))
    assert fitted.packed.fits == expected.packed.fits
    assert found(fitted, "metp", load) == found(expected, "metp", plain)


def test_what_computes_every_score_of_a_document_is_told_by_all_of_them():
    window = 512
    hiding, all_seen = fit_table(table_of(window, hides=("metp",))), fit_table(table_of(None))
    assert found(hiding, "metp", a_load(4, window)) == found(all_seen, "metp", a_load(4, None))


@pytest.mark.parametrize("fitted", [False, True])
def test_a_row_of_one_document_costs_what_the_document_costs(fitted):
    table = table_of(512)
    rows = tuple(measured_rows(range(8), 512)) if fitted else ()
    model = fit_table(dataclasses.replace(table, rows=rows))
    costs = RowCosts(model, load_of_one(8192, P, causal=True, window=512))
    for name in NAMES:
        one = model.operation(name, ATTENTION, 8192)
        assert costs(name, ATTENTION, 8192).time_seconds == one.time_seconds


def test_score_rows_keep_columns_for_the_keys_that_come_within_the_window():
    """Of own keys and of the 2 x 511 that come; to one document come 511."""
    s, window = 8192, 512
    model = fit_table(table_of(window))
    one, spread = (
        RowCosts(model, load)("colossal_z", ATTENTION, s).kept_bytes
        for load in (
            load_of_one(s, P, causal=True, window=window),
            load_of(zigzag((s,), P), causal=True, window=window),
        )
    )
    z = model.packed.sizes
    assert spread - one == s // P * z.n * z.element_bytes * (window - 1)


def test_rows_of_a_model_with_a_window_are_read_as_they_were_written(tmp_path):
    table = dataclasses.replace(table_of(512), rows=tuple(measured_rows(range(8), 512)))
    model, path = fit_table(table), tmp_path / "costs.json"
    write_cost_file(path, table, model)
    read = read_cost_file(path)
    assert read.table.rows == table.rows and read.model.packed == model.packed
    assert read.table.rows[0].load.within is not None


def values_of(tmp_path, window):
    table = dataclasses.replace(table_of(window), rows=tuple(measured_rows(range(4), window)))
    path = tmp_path / "costs.json"
    write_cost_file(path, table)
    return path, json.loads(path.read_text())


def test_without_a_window_a_row_tells_only_its_buffers_besides(tmp_path):
    _, values = values_of(tmp_path, None)
    assert list(values["rows"][0]["load"]) == [
        *("seq_length", "p", "scores", "fullest_scores", "keys_received", "documents"),
        *("fullest_documents", "peers", "in_order", "buffers"),
    ]


def test_rows_of_earlier_files_are_read_without_buffers(tmp_path):
    path, values = values_of(tmp_path, None)
    for row in values["rows"]:
        del row["load"]["buffers"]["pieces"]
    path.write_text(json.dumps(values))
    assert {m.load.buffers.pieces for m in read_cost_file(path).table.rows} == {0}
    for row in values["rows"]:
        del row["load"]["buffers"]
    path.write_text(json.dumps(values))
    assert {m.load.buffers for m in read_cost_file(path).table.rows} == {None}


@pytest.mark.parametrize(
    ("window", "change", "says"),
    [
        (
            512,
            lambda load: load.pop("within"),
            r"rows\[0\]\.load lacks 'within', .* --packed again",
        ),
        (512, lambda load: load["within"].pop("peers"), r"load\.within lacks 'peers'"),
        (512, lambda load: load["within"].update(more=1), r"load\.within has unknown 'more'"),
        (512, lambda load: load["within"].update(scores=0), r"load\.within\.scores must lie in"),
        (
            512,
            lambda load: load["within"].update(keys_received=load["keys_received"] + 1),
            r"load\.within\.keys_received must lie in",
        ),
        (512, lambda load: load.update(within=None), r"load\.within must be an obj"),
        (None, lambda load: load.update(within={}), r"load has unknown 'within'"),
        (None, lambda load: load.update(peers=load["p"]), r"load\.peers must lie in"),
        (None, lambda load: load["buffers"].pop("held"), r"load\.buffers lacks 'held'"),
        (None, lambda load: load["buffers"].update(piece=-1), r"buffers\.piece must lie in"),
    ],
)
def test_what_is_wrong_with_a_window_in_rows_is_said_in_one_line(window, change, says, tmp_path):
    path, values = values_of(tmp_path, window)
    change(values["rows"][0]["load"])
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=says) as error:
        read_cost_file(path)
    assert "\n" not in str(error.value)


def test_a_window_of_no_key_is_refused(tmp_path):
    path, values = values_of(tmp_path, 512)
    values["description"]["halves"]["attention"]["window"] = 0
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"halves\.attention\.window must lie in \[1"):
        read_cost_file(path)
