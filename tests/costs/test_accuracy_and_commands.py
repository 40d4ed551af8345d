"""The accuracy report and the commands, on synthetic tables."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from megatron_paradyse.costs import commands, model
from megatron_paradyse.costs.accuracy import Errors, measure_accuracy, summarize
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.table import BYTES_ONLY, CostTable
from megatron_paradyse.errors import UserError
from tests.costs.synthetic import CONSTANTS, DESCRIPTION, LENGTHS, make_table

TABLE = make_table(LENGTHS, ("megatron_ts", "colossal_z"), noise=0.02)

ASKED = ("time_seconds", "kept_bytes")
WHOLE = make_table(LENGTHS, ("metp",), ("mlp",), model_parts=False).measurements


@pytest.fixture(scope="module")
def errors():
    return measure_accuracy(TABLE)


def test_hybrid_beats_the_published_model_on_synthetic_held_out_lengths(errors):
    summary = summarize(errors)
    ours, theirs = summary["hybrid"], summary["paper"]
    assert ours["time_median"] <= 0.05 and ours["time_p95"] <= 0.15
    assert ours["time_median_2x"] <= 0.1
    assert ours["memory_max"] <= 0.02 and ours["memory_max_4x"] <= 0.03
    for name in ("time_median", "time_p95", "memory_max", "time_median_2x", "memory_max_4x"):
        assert ours[name] <= theirs[name]


def test_only_interior_lengths_are_left_out_and_extrapolations_see_half_the_lengths(errors):
    counts = {(e.scope, len(e.errors)) for e in errors if e.operation == "mlp"}
    # of 9 lengths: 7 inside; L is one of the 5th to the 8th, and two of them have a 4 L
    assert counts == {("inside", 7), ("2x", 4), ("4x", 3)}


def test_an_extrapolation_sees_half_of_an_odd_number_of_lengths_too():
    lengths = tuple(128 << i for i in range(11))
    table = make_table(lengths, ("metp",), ("mlp",), model_parts=False)
    found = measure_accuracy(table, models=("hybrid",))
    counts = {e.scope: len(e.errors) for e in found if e.quantity == "kept_bytes"}
    assert counts == {"inside": 9, "2x": 5, "4x": 4}  # from 6 lengths on


def test_whole_layers_are_no_part_of_the_summary(errors):
    """They are checks of the sums of their halves."""
    names = ("layer", "layer@2")
    wholes = [replace(e, operation=name, errors=(9.0,)) for e in errors for name in names]
    assert summarize([*errors, *wholes]) == summarize(errors)


def test_held_out_lengths_are_sorted_by_how_far_beyond_they_are():
    """Of shorter ones than were fitted, and of those that were, nothing is asked."""
    at_bounds = (49_152, 98_304, 196_608)  # 1.5, 3 and 6 times the longest
    lengths = (64, 256, 300, 1000, *at_bounds, 70_000, 130_000, 500_000)
    other = make_table(lengths, ("megatron_ts",))
    found = measure_accuracy(TABLE, other, ("hybrid",))
    counts = {
        e.scope: len(e.errors) for e in found if (e.operation, e.quantity) == ("mlp", "kept_bytes")
    }
    assert counts == {"inside": 2, "2x": 2, "4x": 3, "further": 1}


def test_lengths_of_which_only_bytes_are_known_say_nothing_of_seconds():
    other = make_table((300, 1000), ("megatron_ts",))
    untimed = {"status": BYTES_ONLY, "forward_seconds": 0.0, "backward_seconds": 0.0}
    points = [replace(m, **untimed) if m.seq_length > 300 else m for m in other.measurements]
    found = measure_accuracy(TABLE, replace(other, measurements=points), ("hybrid",))
    counts = {e.quantity: len(e.errors) for e in found if e.operation == "mlp"}
    assert counts["kept_bytes"] == 2
    assert counts["time_seconds"] == counts["forward_seconds"] == 1


def test_seconds_are_asked_for_by_the_lengths_that_were_timed():
    """The longest of them is not inside, and five make an extrapolation; others are not known."""
    untimed = {"status": BYTES_ONLY, "forward_seconds": 0.0, "backward_seconds": 0.0}

    def counts(without, held_out=None):
        points = [replace(m, **untimed) if m.seq_length in without else m for m in WHOLE]
        table = replace(TABLE, measurements=points)
        found = measure_accuracy(table, held_out, ("hybrid",))
        return {(e.quantity[:4], e.scope): len(e.errors) for e in found if e.quantity in ASKED}

    known = {("kept", "inside"): 7, ("kept", "2x"): 4, ("kept", "4x"): 3}
    assert counts(LENGTHS[-3:]) == known | {("time", "inside"): 4, ("time", "2x"): 1}
    assert counts(LENGTHS[1:-1:2]) == known | {("time", "inside"): 3}
    other = make_table((1024, 3000), ("metp",), ("mlp",), model_parts=False)
    assert counts((1024,), other) == {("time", "inside"): 2, ("kept", "inside"): 1}


def test_too_few_lengths_are_refused():
    with pytest.raises(UserError, match="no length can be held out: measure at 4 lengths"):
        measure_accuracy(make_table(LENGTHS[:3], ("metp",)))


def test_errors_tell_the_middle_and_the_largest():
    one = Errors("hybrid", "metp", "mlp", "kept_bytes", "inside", (0.1, 0.5, 0.2))
    assert (one.median, one.max) == (0.2, 0.5)


def test_choices_in_the_help_are_those_of_the_code():
    assert commands.MODELS == model.MODELS


def run(*arguments):
    return CliRunner().invoke(cli, arguments, catch_exceptions=True)


def test_fit_writes_a_cost_file_that_predicts(tmp_path):
    profile, output = str(tmp_path / "profile.json"), str(tmp_path / "costs.json")
    write_cost_file(profile, TABLE)
    result = run("fit", profile, "-o", output, "--model", "paper")
    assert result.exit_code == 0, result.output
    assert "paper model of 6 operations written" in result.output
    assert read_cost_file(output).require_model().kind == "paper"
    result = run("fit", output, "-o", output, "--json")
    assert json.loads(result.output)["model"] == "hybrid"
    assert read_cost_file(output).require_model().kind == "hybrid"
    assert sorted(os.listdir(tmp_path)) == ["costs.json", "profile.json"]


def test_accuracy_prints_a_table_json_and_a_figure(tmp_path):
    profile, figure = str(tmp_path / "profile.json"), tmp_path / "accuracy.png"
    table = make_table(LENGTHS[:7], ("metp",), model_parts=False)
    write_cost_file(profile, table)
    result = run("accuracy", profile, "--details", "--plot", str(figure))
    assert result.exit_code == 0, result.output
    assert "Relative error at lengths not fitted" in result.output
    assert "simulated on synthetic" in result.output
    names = {line.split("│")[3].strip() for line in result.output.splitlines() if "│ 4x" in line}
    assert {"forward_seconds", "forward_bytes", "backward_seconds", "backward_bytes"} <= names
    assert figure.read_bytes().startswith(b"\x89PNG")
    values = json.loads(run("accuracy", profile, "--json").output)
    assert set(values["summary"]) == {"hybrid", "paper"}
    assert len(values["rows"]) == 2 * 2 * 6 * 3
    result = run("accuracy", profile, "--plot", str(tmp_path / "accuracy.exe"))
    assert result.exit_code == 1
    assert "error: a figure ends in .png, .svg or .pdf" in result.output


def test_accuracy_refuses_held_out_lengths_of_another_configuration(tmp_path):
    import dataclasses

    other = CostTable(dataclasses.replace(DESCRIPTION, p=8), TABLE.measurements, CONSTANTS)
    for name, table in (("a", TABLE), ("b", other)):
        write_cost_file(tmp_path / name, table)
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    result = run("accuracy", first, "--held-out", second)
    assert f"{second} is a profile of something else (p: 4 in {first}, 8 in {second})" in (
        result.output
    )
    assert "run" not in result.output and "accept" not in result.output  # there is none


def test_cost_modules_do_not_name_torch():
    folder = Path(commands.__file__).parent
    for path in folder.glob("*.py"):
        assert "import torch" not in path.read_text(), path
