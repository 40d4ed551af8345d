"""What benchmarks that profile or simulate first ask for: with --quick how little."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import (
    cost_model,
    dynamic_workload,
    gpu_limits,
    hybrid_cp,
    loss_curves,
    max_length,
    max_length_real,
    megatron_flags,
    packed_workload,
    whole_model,
    wrong_costs,
)
from benchmarks.dynamic_workload_rank import switch_overhead
from megatron_paradyse.profiler.commands import profile
from megatron_paradyse.profiler.points import Options, choose_lengths
from reproduction import costs, peer
from reproduction.measured_rank import Trained
from tests.train.synthetic_costs import write_costs


class FirstSimulationError(Exception):
    """Ends a benchmark."""


def test_a_quick_estimate_simulates_few_lengths_and_keeps_none(monkeypatch):
    ran: list[tuple[Path, list[str]]] = []

    def simulate(path, model, flags, *, ranks):
        ran.append((path, flags))
        raise FirstSimulationError

    monkeypatch.setattr(costs, "run_simulator", simulate)
    monkeypatch.setattr(sys, "argv", ["hybrid_cp.py", "--quick"])
    with pytest.raises(FirstSimulationError):
        hybrid_cp.main()
    path, flags = ran.pop()
    assert not path.is_relative_to(costs.ROOT) and not path.parent.exists()
    assert flags[flags.index("--lengths") + 1].count(",") == 2
    assert flags[flags.index("--strategies") + 1].split(",") == list(costs.COARSE_STRATEGIES)
    coarse = costs.ModelCosts("llama", path.parent, coarse=True)
    with pytest.raises(FirstSimulationError):
        peer._cost_file(coarse, 1)
    assert ran[0][1][1] == "512,16384,262144"


@pytest.mark.parametrize("benchmark", [dynamic_workload, packed_workload])
def test_a_quick_workload_is_of_a_small_model_on_two_ranks(benchmark, monkeypatch, capsys):
    commands: list[list[str]] = []
    spawned: list[tuple[list[str], int]] = []

    def run(command, **how):
        commands.append(command)
        if "fit" in command:
            write_costs(Path(command[-1]))

    def spawn(module, flags, *, ranks, timeout_seconds):
        spawned.append((flags, ranks))
        name = module.rpartition(".")[2].removesuffix("_rank").upper()
        task = json.loads(dynamic_workload.os.environ[name])
        assert task["rounds"] == 1 and len(task["lengths"]) <= 4
        Path(task["output"]).write_text("{}")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(benchmark, "spawn", spawn)
    monkeypatch.setattr(packed_workload, "measure_row_accuracy", lambda table: [])
    monkeypatch.setattr(packed_workload, "row_lines", lambda errors: [])
    monkeypatch.setattr(packed_workload, "summarize_rows", lambda errors: {})
    monkeypatch.setattr(hybrid_cp, "estimate", lambda *of, **how: pytest.fail("takes a minute"))
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--quick"])
    for name in ("DYNAMIC_WORKLOAD", "PACKED_WORKLOAD"):
        monkeypatch.setenv(name, "")
    benchmark.main()
    profile = commands[0]
    assert "--quick" in profile and profile[profile.index("--nproc") + 1] == "2"
    for flags in (profile, spawned[0][0]):
        assert flags[flags.index("--num-layers") + 1] == "2"
    assert spawned[0][1] == 2
    configuration = json.loads(capsys.readouterr().out.splitlines()[-1])["configuration"]
    assert configuration["ranks"] == 2 and configuration["--num-layers"] == 2


def test_what_choosing_takes_is_told_of_the_policies_that_choose():
    choosing = {"metp": [0.0, 0.0], "optimal": [0.5, 0.25], "heuristic": [0.25, 0.5]}
    seconds = {"metp": [[20.0], [30.0]], "optimal": [[5.0], [10.0]], "heuristic": [[5.0], [10.0]]}
    assert switch_overhead(choosing, seconds) == 0.05


def test_a_switch_of_the_case_study_chooses_by_cost_at_lengths_not_seen_before(monkeypatch):
    """Of a fixed strategy, whose iterations are timed beside it, there is nothing to choose."""
    trained = object.__new__(Trained)
    trained._task, trained._enforced, trained._costs = {"length": 64, "iterations": 4}, True, "x"
    trained.policies = {}
    asked: list[tuple[str, int]] = []

    def choose(name, length):
        asked.append((name, length))
        return length / 1000

    monkeypatch.setattr(trained, "seconds", lambda name, length: 1.0)
    monkeypatch.setattr(trained, "peak", lambda name, length: 1e9)
    monkeypatch.setattr(trained, "chooser", lambda **settings: settings["policy"])
    monkeypatch.setattr(trained, "_choose", choose)
    found = trained.switch()
    assert asked == [("optimal", 64 + 16 * i) for i in range(1, 17)]
    assert trained.policies["optimal"] == "optimal"
    assert found["choosing"] == found["switch"] == 0.2


def test_the_second_profile_of_the_cost_models_errors_is_of_timed_lengths_alone(monkeypatch):
    """The first measures bytes at others, and both are of the same."""
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **how: commands.append(command))
    monkeypatch.setattr(cost_model, "read_cost_file", lambda path: Namespace(table=None))
    lengths = []
    for untimed in (cost_model.FULL.untimed, ()):
        cost_model.profiled(Path("x.json"), cost_model.FULL, untimed, quick=False)
        asked = profile.make_context("profile", commands.pop()[4:]).params
        names = ("output", "lengths", "bytes_lengths")
        options = Options(**{name: asked[name] for name in names})
        lengths.append(choose_lengths(options, 8192, p=cost_model.RANKS))
    first, second = lengths
    assert set(first.values()) == {True, False} and set(second.values()) == {True}
    assert list(second) == [s for s, is_timed in first.items() if is_timed]


def test_limits_keep_their_trials_in_a_folder_of_where_they_were_started(monkeypatch, tmp_path):
    """Its commands run in the checkout."""
    started: list[list[str]] = []

    def run(command, *, cwd, **how):
        assert cwd == gpu_limits.ROOT
        started.append(command)
        raise FirstSimulationError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu_limits.py", "--quick", "--folder", "limits"])
    with pytest.raises(FirstSimulationError):
        gpu_limits.main()
    (command,) = started
    assert command[command.index("-o") + 1] == str(tmp_path / "limits/gpt-raw.json")


@pytest.mark.parametrize(
    ("benchmark", "option", "value", "said"),
    [
        (dynamic_workload, "--costs", "none.json", "none.json does not exist"),
        (dynamic_workload, "--documents", "0", "expected 1 or more, got '0'"),
        (dynamic_workload, "--seed", "-1", "expected 0 or more, got '-1'"),
        (gpu_limits, "--folder", "/dev/null/x", "/dev/null/x: Not a directory"),
        (hybrid_cp, "--folder", "/dev/null/x", "/dev/null/x: Not a directory"),
        (gpu_limits, "--models", "gpt,gtp", "none is named 'gtp': use some of gpt, llama, bert"),
        (loss_curves, "--grids", "tp8", "none is named 'tp8': use some of tp4"),
        (max_length, "--costs", "none.json", "none.json does not exist"),
        (max_length, "--models", "", "none is named '': use some of gpt"),
        (megatron_flags, "--combinations", "-1", "expected 1 or more, got '-1'"),
        (megatron_flags, "--combinations", "0", "expected 1 or more, got '0'"),
        (packed_workload, "--budget", "250M", "a size is written like 76GiB"),
        (packed_workload, "--fixed", "metp,meta", "no strategy named 'meta'"),
        (packed_workload, "--global-batches", "one", "expected 1 or more, got 'one'"),
        (whole_model, "--plans", "0", "expected 1 or more, got '0'"),
        (wrong_costs, "--rounds", "0", "expected 1 or more, got '0'"),
    ],
)
def test_a_wrong_value_is_told_in_a_line_before_anything_runs(
    benchmark, option, value, said, monkeypatch, capsys
):
    for starts in ("run", "Popen"):
        monkeypatch.setattr(subprocess, starts, lambda *of, **how: pytest.fail("runs"))
    monkeypatch.setattr(sys, "argv", ["benchmark.py", f"{option}={value}"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    assert f"error: argument {option}: {said}" in capsys.readouterr().err.splitlines()[-1]


def test_trainings_within_a_budget_begin(tmp_path, monkeypatch):
    """Their lengths are limits, which --quick does not train at: once none of them began."""
    flags = [str(text) for pair in dynamic_workload.QUICK_MODEL.items() for text in pair]
    monkeypatch.setattr(max_length_real, "RANKS", 1)
    costs = str(tmp_path / "none.json")
    ended = max_length_real._train(tmp_path / "a", "fixed:metp", 64, costs, flags)
    assert ended == {"finished": True, "out_of_memory": False, "error": ""}
    with pytest.raises(RuntimeError, match=r"tells nothing of memory: error: .*none\.json"):
        max_length_real._train(tmp_path / "b", "optimal", 64, costs, flags)
