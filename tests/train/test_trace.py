"""What a training writes about itself, read by the report as it is."""

from __future__ import annotations

import json
import math
import os
import threading

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.errors import UserError
from megatron_paradyse.report.trace_file import read_trace
from megatron_paradyse.train import trace as trace_module
from megatron_paradyse.train.trace import Trace
from tests.train.harness import data_flags, estimates, train
from tests.train.synthetic_costs import write_costs

TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
MICROBATCHES = ["--micro-batch-size", 1, "--global-batch-size", 2, "--train-iters", 2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    data = data_flags(tmp_path_factory.mktemp("data"), [40, 60, 30, 64] * 10)
    return [*data, *TP2, *MICROBATCHES]


def test_a_trace_says_first_what_runs_and_the_report_reads_all_of_it(data, tmp_path):
    costs = write_costs(tmp_path / "costs.json")
    path = tmp_path / "trace.jsonl"
    flags = ["--paradyse-policy", "optimal", "--paradyse-cost-model", costs]
    flags += ["--paradyse-accept-costs", "--paradyse-memory-budget", "150MB"]
    train(tmp_path, *data, *flags, "--paradyse-trace", path, ranks=2)
    assert json.loads(path.read_text().splitlines()[0])["kind"] == "run"
    trace = read_trace(str(path))
    assert trace.warnings == {} and trace.budgets == [(1, 2, 150_000_000)]
    (run,) = trace.runs
    assert run.policy == "optimal" and run.costs.startswith("simulated on synthetic")
    assert run.ranks == {"world": 2, "tensor": 2, "pipeline": 1, "data": 1}
    assert run.place == trace.place == (0, 0)
    assert run.model == {"num_layers": 4, "hidden_size": 64} and run.dtype == "float32"
    (stage,) = run.stages
    assert stage.budget_bytes == 150_000_000 and stage.has_embedding and stage.has_head
    assert trace.summary.microbatches == 4 and trace.iterations.count == 2
    assert trace.summary.median_error is not None and trace.longest >= 60


@pytest.mark.parametrize("sequences", ["documents", "packed"])
def test_the_report_estimates_single_strategies_as_the_training_does(sequences, data, tmp_path):
    costs = write_costs(tmp_path / "costs.json")
    path = tmp_path / "trace.jsonl"
    flags = ["--paradyse-policy", "optimal", "--paradyse-cost-model", costs, "--global-batch-size"]
    flags += [8, "--paradyse-accept-costs", "--paradyse-memory-budget", "15MB"]
    flags += ["--paradyse-sequences", sequences, "--paradyse-trace", path]
    run = train(tmp_path, *data, *flags, ranks=2)
    told = estimates(run.stdout.splitlines())
    assert any("would not fit" in line for line in told) and any("% time" in line for line in told)
    trace = read_trace(str(path), read_cost_file(str(costs)))
    assert trace.summary.unpriced == 0 and estimates(trace.summary.lines()) == told


def test_a_trace_of_a_fixed_policy_has_neither_costs_nor_stages(data, tmp_path):
    path = tmp_path / "trace.jsonl"
    train(tmp_path, *data, "--paradyse-trace", path, ranks=2)
    trace = read_trace(str(path))
    (run,) = trace.runs
    assert trace.warnings == {} and run.policy == "fixed:megatron_ts"
    assert (run.costs, run.stages, run.memory_budget_bytes) == ("", (), None)
    assert trace.summary.layer_shares == {"megatron_ts": 1.0}


def test_a_training_that_megatron_ends_early_is_summed_up_too(data, tmp_path):
    """At --exit-interval, as at a time limit or a signal, it exits out of its loop."""
    run = train(tmp_path, *data, "--exit-interval", 1, ranks=2)
    assert len(run.records) == 1
    assert run.stdout.count("paradyse: 2 microbatches, 0 changes of plan") == 1


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_null(loss, tmp_path, monkeypatch):
    path = trace_of_one_grid(tmp_path, monkeypatch)
    Trace(str(path)).iteration(1, [], {"seconds": 0.5, "lm loss": loss})
    (record,) = (json.loads(line, parse_constant=pytest.fail) for line in path.open())
    assert record == {"kind": "iteration", "iteration": 1, "seconds": 0.5, "lm loss": None}
    trace = read_trace(str(path))
    assert trace.warnings == {} and trace.iterations.count == 1


@pytest.mark.parametrize("begin", [b"", b'{"ki', b'{"kind": "run"'])
def test_a_trace_goes_on_after_a_start_that_was_killed(begin, tmp_path, monkeypatch):
    path = trace_of_one_grid(tmp_path, monkeypatch)
    path.write_bytes(begin)
    Trace(str(path)).start({"date": "x"})
    assert json.loads(path.read_text().splitlines()[-1]) == {"kind": "run", "date": "x"}
    assert path.read_bytes().startswith(begin)


@pytest.mark.parametrize("text", ['{"schema_version": 1}', "\0\1", "x"])
def test_another_file_is_not_added_to(text, tmp_path, monkeypatch):
    """As the costs or the tokens of the same training, named by mistake."""
    path = trace_of_one_grid(tmp_path, monkeypatch)
    path.write_text(text)
    with pytest.raises(UserError, match="is another file, not a trace: give the name of a new"):
        Trace(str(path)).start({})
    assert path.read_text() == text


def test_a_pipe_that_nobody_reads_is_refused(tmp_path, monkeypatch):
    path = trace_of_one_grid(tmp_path, monkeypatch)
    os.mkfifo(path)
    with pytest.raises(UserError, match="No such device or address: give a file"):
        Trace(str(path)).start({})


def test_who_reads_a_pipe_reads_the_whole_training(tmp_path, monkeypatch):
    """As `cat pipe`, which leaves at the first end that it meets."""
    path, kinds, read = trace_of_one_grid(tmp_path, monkeypatch), [], threading.Event()
    os.mkfifo(path)

    def reader():
        with path.open() as lines:
            for line in lines:
                kinds.append(json.loads(line)["kind"])
                read.set()

    thread = threading.Thread(target=reader, daemon=True)
    thread.start()
    kept = os.open(path, os.O_RDWR)  # until the trace has begun
    trace = Trace(str(path))
    trace.start({})
    os.close(kept)
    assert read.wait(timeout=60)
    trace.iteration(1, [], {"seconds": 0.5})
    os.close(trace._pipe)
    thread.join(timeout=60)
    assert kinds == ["run", "iteration"]


def trace_of_one_grid(folder, monkeypatch):
    for name in ("data_parallel", "pipeline_model_parallel"):
        monkeypatch.setattr(trace_module.mpu, f"get_{name}_world_size", lambda: 1)
    monkeypatch.setattr(trace_module.mpu, "get_tensor_model_parallel_rank", lambda: 0)
    return folder / "trace.jsonl"
