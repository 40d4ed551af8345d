"""Training on documents: the grid, padding and restarts change nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.train.harness import (
    LLAMA,
    attempt,
    data_flags,
    run_forked,
    train,
    with_defaults,
    write_documents,
)

LENGTHS = np.random.default_rng(5).integers(2, 90, size=60).tolist()
TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return [*data_flags(tmp_path_factory.mktemp("data"), LENGTHS), "--lr", "1e-3"]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """One rank, one document per microbatch: no padding anywhere. Saves after 2 of 4 iterations."""
    folder = tmp_path_factory.mktemp("alone")
    saved = ["--save", folder / "saved", "--save-interval", 2]
    run = train(folder, *data, *saved, "--micro-batch-size", 1, ranks=1)
    (folder / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    return run, folder / "saved"


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (1, ["--micro-batch-size", 4]),  # pads to the longest of four
        (2, TP2),  # pads to multiples of four
        (4, [*TP2, "--pipeline-model-parallel-size", 2]),  # microbatches of different lengths
        (4, [*TP2, "--micro-batch-size", 1]),  # two replicas with documents of their own
    ],
    ids=["batch4", "tp2", "tp2-pp2", "tp2-dp2"],
)
def test_padding_and_grid_change_neither_loss_nor_gradient(ranks, flags, data, alone, tmp_path):
    """From the checkpoint of one rank: the same two iterations on every grid."""
    expected, checkpoint = alone
    run = train(tmp_path, *data, *flags, "--load", checkpoint, ranks=ranks)
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(run.values(name), expected.values(name)[2:], rtol=1e-5)


def test_resuming_continues_at_the_exact_sample(data, tmp_path):
    """Killed after iteration 3 of 6 and started again: the same losses, on interleaved stages."""
    flags = [*data, *TP2, "--train-iters", 6, "--hidden-dropout", 0.1, "--seed", 7]
    saved = ["--save", tmp_path / "saved", "--save-interval", 3]
    whole = train(tmp_path / "whole", *flags, *saved, ranks=2)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = train(tmp_path / "rest", *flags, "--load", tmp_path / "saved", ranks=2)
    assert [record["iteration"] for record in resumed.records] == [4, 5, 6]
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(resumed.values(name), whole.values(name)[3:], rtol=1e-6)


@pytest.mark.parametrize("sequences", ["documents", "packed"])
def test_resuming_draws_the_same_dropout_on_every_replica(sequences, data, tmp_path):
    """Of two whose documents differ in length, and so in how much they draw."""
    flags = [*data, "--micro-batch-size", 1, "--train-iters", 4, "--hidden-dropout", 0.1]
    flags += ["--paradyse-sequences", sequences, "--save", tmp_path / "saved"]
    flags += ["--paradyse-pack-tokens", 96] if sequences == "packed" else []
    whole = train(tmp_path / "whole", *flags, "--save-interval", 2, ranks=2)
    load = ["--load", tmp_path / "saved", "--ckpt-step", 2, "--save-interval", 100]
    resumed = train(tmp_path / "rest", *flags, *load, ranks=2)
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(resumed.values(name), whole.values(name)[2:], rtol=1e-6)


def test_a_run_that_saves_less_goes_on_from_a_whole_checkpoint(data, tmp_path):
    """--no-save-optim and --no-save-rng are of what is written, not of what is read."""
    flags = [*data, "--train-iters", 3, "--hidden-dropout", 0.1, "--save-interval", 2, "--save"]
    whole = train(tmp_path / "whole", *flags, tmp_path / "saved", ranks=1)
    flags += [tmp_path / "less", "--no-save-optim", "--no-save-rng"]
    load = ["--load", tmp_path / "saved", "--ckpt-step", 2]
    resumed = train(tmp_path / "rest", *flags, *load, ranks=1)
    assert resumed.records == whole.records[2:]
    refused = attempt(tmp_path / "next", *flags, "--load", tmp_path / "less", ranks=1)
    assert refused.code == 2
    assert "it was saved with --no-save-optim: give --no-load-optim, or another" in refused.stderr


@pytest.mark.parametrize("sequences", ["documents", "packed"])
def test_a_phase_begins_with_the_first_documents_of_its_data(sequences, tmp_path):
    """--phase-transition-iterations: saves, ends; the next start reads its data from the first."""
    flags = ["--split", "100,0,0", "--paradyse", "--paradyse-sequences", sequences]
    flags += ["--micro-batch-size", 1, "--train-samples", 16]
    if sequences == "packed":
        flags += ["--paradyse-pack-tokens", 128]
    for name, seed in (("one", 1), ("other", 2)):
        lengths = np.random.default_rng(seed).integers(2, 60, size=60).tolist()
        write_documents(tmp_path / name, lengths)
    phases = ["--phase-transition-iterations", "2", "--save-interval", 100]
    phases += ["--save", tmp_path / "saved", "--load", tmp_path / "saved", "--no-mmap-bin-files"]
    first = train(tmp_path / "1", *flags, *phases, "--data-path", tmp_path / "one", ranks=1)
    assert [record["iteration"] for record in first.records] == [1, 2]
    second = train(tmp_path / "2", *flags, *phases, "--data-path", tmp_path / "other", ranks=1)
    assert [record["iteration"] for record in second.records] == [3, 4]
    fresh = train(tmp_path / "3", *flags, "--data-path", tmp_path / "other", ranks=1)
    np.testing.assert_array_equal(second.values("tokens"), fresh.values("tokens")[:2])


def test_interleaved_pipeline_evaluation_and_trace(data, tmp_path):
    """Virtual stages, a blend of two data sets, validation, and a trace of each grid."""
    trace = tmp_path / "trace.jsonl"
    prefix = data[1]
    flags = ["--paradyse", "--data-path", 0.7, prefix, 0.3, prefix, "--split", "80,20,0", *LLAMA]
    flags += ["--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 1]
    flags += ["--eval-iters", 1, "--eval-interval", 2, "--paradyse-order", "bucketed"]
    flags += ["--paradyse-trace", trace, "--paradyse-log", "compact"]
    run = train(tmp_path, *flags, ranks=2)
    last = trace.with_name("trace-dp0-pp1.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, last) if line["kind"] == "iteration"]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    assert [line["tokens"] for line in lines] == run.values("tokens").tolist()
    assert all(
        0 < line["shortest_sequence_tokens"] <= line["longest_sequence_tokens"] <= 64
        for line in lines
    )
    assert run.stdout.count("validation loss at iteration 2") == 1
    assert "iteration 4/4 | lengths" in run.stdout
    assert "attention kernel torch CPU flash" in run.stdout
    assert "bucketed: each global batch is of one data set" in run.stdout


@pytest.mark.parametrize(
    "flags", [[], ["--paradyse-sequences", "packed", "--paradyse-pack-tokens", 128]]
)
def test_a_job_that_is_told_to_end_saves_whatever_its_loaders_workers_hear(flags, data, tmp_path):
    """SIGTERM of a scheduler reaches the workers too; PyTorch's handler would end them."""
    saved = ["--save", tmp_path / "saved", "--save-interval", 100, "--exit-signal-handler"]
    given = ["--micro-batch-size", 1, "--num-workers", 1, "--train-iters", 4, *saved]
    code, _, stderr = run_forked(
        "tests.train.signalled",
        with_defaults([*data, *flags, *given]),
        ranks=1,
        folder=tmp_path,
        timeout_seconds=120,
    )
    assert code == 0, stderr[-3000:]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2"
