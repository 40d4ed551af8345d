"""Training on packed microbatches: the same documents, losses and counts as one by one."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.train.harness import LLAMA, data_flags, train
from tests.train.synthetic_costs import write_costs

ITERATIONS, SAVED = 6, 4
TOKENS = 64  # some documents are longer
LENGTHS = np.random.default_rng(5).integers(2, 90, size=200).tolist()
TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
PACKED = ["--paradyse-sequences", "packed"]
BY_FLAG = [*PACKED, "--paradyse-pack-tokens", TOKENS]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    flags = [*data_flags(tmp_path_factory.mktemp("data"), LENGTHS, "80,20,0"), *LLAMA]
    flags += ["--lr", "1e-3", "--mtp-num-layers", 1]  # tokens weigh as in documents one by one
    flags += ["--micro-batch-size", 1, "--global-batch-size", 16, "--seq-length", 96]
    return [*flags, "--train-iters", ITERATIONS, "--eval-iters", 1, "--eval-interval", ITERATIONS]


@pytest.fixture(scope="module")
def unpacked(data, tmp_path_factory):
    """One rank, a microbatch for every document. Saves before the last iterations."""
    folder = tmp_path_factory.mktemp("alone")
    run = train(folder, *data, "--save", folder / "saved", "--save-interval", SAVED, ranks=1)
    (folder / "saved" / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return run, folder / "saved"


def validation_loss(run) -> float:
    return float(re.findall(r"validation loss at .*? lm loss value: (\S+)", run.stdout)[0])


def test_the_loss_curve_is_that_of_documents_one_by_one(data, unpacked, tmp_path):
    run = train(tmp_path, *data, *BY_FLAG, ranks=1)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(run.values(name), unpacked[0].values(name), rtol=1e-4)
    np.testing.assert_array_equal(run.values("tokens"), unpacked[0].values("tokens"))
    assert validation_loss(run) == pytest.approx(validation_loss(unpacked[0]), rel=1e-4)
    consumed = [re.findall(r"consumed samples: +(\d+)", r.stdout) for r in (run, unpacked[0])]
    assert consumed[0] == consumed[1] and consumed[0][-1] == str(16 * ITERATIONS)


EXPERTS = ["--num-experts", 4, "--moe-router-topk", 2, "--moe-token-dispatcher-type", "alltoall"]
EXPERTS += ["--moe-router-load-balancing-type", "none"]


def test_experts_over_replicas_train_on_rows_as_one_replica_on_documents(data, tmp_path):
    """From the same checkpoint: of 2 ranks each has all of 4 experts, of 4 ranks halves of 2."""
    saved = tmp_path / "saved"
    flags = [*data, *EXPERTS, "--train-iters", 2, "--save-interval", 1]
    alone = ["--save", saved, *TP2, "--expert-tensor-parallel-size", 1]
    documents = train(tmp_path / "documents", *flags, *alone, ranks=2)
    (saved / "latest_checkpointed_iteration.txt").write_text("1")
    policy = ["--paradyse-policy", "random:1", "--load", saved, "--no-load-rng", *TP2]
    grid = ["--expert-model-parallel-size", 2]
    rows = train(tmp_path / "rows", *flags, *BY_FLAG, *policy, *grid, ranks=4)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(rows.values(name), documents.values(name)[1:], rtol=1e-5)


STAGES = ["--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 2]


@pytest.mark.parametrize(
    "strategy, flags",
    [("megatron_cz", []), ("metp", STAGES)],
    ids=["tp2-dp2", "tp2-pp2-interleaved"],
)
def test_grids_resume_at_the_exact_document(strategy, flags, data, unpacked, tmp_path):
    """From the checkpoint of one rank without packing: the same last iterations."""
    expected, checkpoint = unpacked
    flags = [*data, *BY_FLAG, *TP2, *flags, "--paradyse-policy", f"fixed:{strategy}"]
    check_continued(tmp_path, flags, expected, checkpoint)


def test_the_planner_chooses_the_budget_ahead_of_the_step(data, unpacked, tmp_path):
    """By invented costs under a budget, packed by a worker of the loader."""
    expected, checkpoint = unpacked
    flags = ["--tensor-model-parallel-size", 4, "--sequence-parallel", "--num-workers", 1]
    flags += ["--paradyse-policy", "optimal", "--paradyse-no-correction", "--paradyse-accept-costs"]
    flags += ["--paradyse-cost-model", write_costs(tmp_path / "costs.json")]
    flags += ["--paradyse-memory-budget", "150MB"]
    check_continued(tmp_path, [*data, *PACKED, *flags], expected, checkpoint)


def check_continued(folder, flags, expected, checkpoint) -> None:
    """The last iterations of a run, trained again from its checkpoint, are the same."""
    trace = folder / "trace.jsonl"
    run = train(folder, *flags, "--paradyse-trace", trace, "--load", checkpoint, ranks=4)
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(run.values(name), expected.values(name)[SAVED:], rtol=1e-5)
    assert validation_loss(run) == pytest.approx(validation_loss(expected), rel=1e-5)
    records = [json.loads(line) for path in folder.glob("trace*") for line in path.open()]
    lengths = [r for r in records if r["kind"] == "iteration"]
    assert all(0 < r["shortest_sequence_tokens"] < r["longest_sequence_tokens"] for r in lengths)
    microbatches = [r for r in records if r["kind"] == "microbatch"]
    assert max(r["microbatch"] for r in microbatches) < 15, "documents share microbatches"
    assert any(r.get("documents", 1) > 1 for r in microbatches)


def test_rows_fit_into_the_memory_of_every_stage(data, tmp_path):
    """The first of two has two microbatches in flight, the last a head and a prediction."""
    costs = write_costs(tmp_path / "costs.json", static_bytes=1e6, num_predicting=1)
    flags = [*PACKED, *STAGES[:2], "--paradyse-policy", "optimal", "--paradyse-cost-model", costs]
    flags += ["--paradyse-accept-costs", "--paradyse-no-correction"]
    flags += ["--paradyse-memory-budget", "16MB", "--paradyse-trace", tmp_path / "trace.jsonl"]
    run = train(tmp_path, *data, "--train-iters", 2, *flags, ranks=2)
    assert "no plan" not in run.stdout + run.stderr
    records = [json.loads(line) for path in tmp_path.glob("trace*") for line in path.open()]
    packed = [record for record in records if "documents" in record]
    assert {record["plan"][0] for record in packed} == {"1", "3"}  # from its first layer on
    assert max(record["predicted_peak_bytes"] for record in packed) * 1.03 <= 16e6
