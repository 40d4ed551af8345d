"""Long documents over several replicas train as they do one by one on one rank."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.report.trace_file import read_trace
from tests.train.harness import LATENT, LLAMA, attempt, data_flags, estimates, train
from tests.train.synthetic_costs import write_costs

ITERATIONS = 2
LENGTHS = np.random.default_rng(6).integers(2, 60, size=60).tolist() + [300, 280, 250, 310] * 5
ROWS = ["--paradyse-sequences", "packed", "--paradyse-pack-tokens", 96]
TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    flags = [*data_flags(tmp_path_factory.mktemp("data"), LENGTHS, "80,20,0"), "--lr", "1e-3"]
    flags += ["--micro-batch-size", 1, "--global-batch-size", 8, "--seq-length", 320]
    return [*flags, "--train-iters", ITERATIONS, "--eval-iters", 1, "--eval-interval", ITERATIONS]


MODELS = {
    "llama": LLAMA,
    "window": [*LLAMA, "--window-size", "24,0", "--window-attn-skip-freq", 2],
    "latent": LATENT,
    "gated": [*LLAMA, "--attention-output-gate"],
    "prediction": [*LLAMA, "--mtp-num-layers", 2],
}


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """By model: one rank, a microbatch for every document."""
    made = {}

    def run(model):
        if model not in made:
            folder = tmp_path_factory.mktemp("alone")
            made[model] = train(folder, *data, *MODELS[model], ranks=1)
        return made[model]

    return run


def wide_microbatches(folder) -> list[dict]:
    records = [json.loads(line) for path in folder.glob("trace*") for line in path.open()]
    return [r for r in records if r["kind"] == "microbatch" and r.get("replicas", 1) > 1]


@pytest.mark.parametrize(
    "model, flags",
    [
        ("llama", [*TP2, "--paradyse-spread", 2, "--paradyse-policy", "fixed:megatron_cz"]),
        ("llama", ["--paradyse-spread", 2, "--paradyse-policy", "fixed:metp+recompute"]),
        ("llama", ["--paradyse-spread", 4, "--paradyse-policy", "fixed:metp"]),
        ("llama", [*TP2, "--paradyse-spread", 2, "--paradyse-policy", "fixed:megatron_ts"]),
        ("window", ["--paradyse-spread", 4, "--paradyse-policy", "random:2"]),
        ("latent", [*TP2, "--paradyse-spread", 2, "--paradyse-policy", "random:1"]),
        ("gated", [*TP2, "--paradyse-spread", 2, "--paradyse-policy", "random:2"]),
        ("prediction", [*TP2, "--paradyse-spread", 2, "--paradyse-policy", "random:3"]),
    ],
    ids=[
        "tp2-spread2",
        "tp1-dp4-spread2",
        "tp1-spread4",
        "megatron_ts",
        "window",
        "latent",
        "gated",
        "prediction",
    ],
)
def test_documents_over_replicas_train_as_one_by_one(model, flags, data, alone, tmp_path):
    trace = ["--paradyse-trace", tmp_path / "trace.jsonl", "--paradyse-verify-plans"]
    run = train(tmp_path, *data, *MODELS[model], *ROWS, *flags, *trace, ranks=4)
    expected = alone(model)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(run.values(name), expected.values(name), rtol=1e-5)
    np.testing.assert_array_equal(run.values("tokens"), expected.values("tokens"))
    assert sum(r["tokens"] >= 250 for r in wide_microbatches(tmp_path)) >= 2


def test_what_fits_on_no_replica_goes_over_two_by_cost(data, alone, tmp_path):
    """By invented costs, under a budget that holds the longest documents on four ranks only."""
    flags = [*TP2, "--paradyse-sequences", "packed", "--paradyse-policy", "optimal"]
    costs = write_costs(tmp_path / "costs.json")
    flags += ["--paradyse-cost-model", costs, "--paradyse-accept-costs"]
    flags += ["--paradyse-no-correction", "--paradyse-verify-plans"]
    flags += ["--paradyse-memory-budget", "13MB", "--paradyse-trace", tmp_path / "trace.jsonl"]
    run = train(tmp_path, *data, *LLAMA, *flags, "--paradyse-spread", 2, ranks=4)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(run.values(name), alone("llama").values(name), rtol=1e-5)
    assert "no plan" not in run.stdout + run.stderr
    wide = wide_microbatches(tmp_path)
    assert sum(r["tokens"] >= 280 for r in wide) >= 2
    assert max(r["predicted_peak_bytes"] for r in wide) * 1.03 <= 13e6
    trace = read_trace(str(tmp_path / "trace-dp0-pp0.jsonl"), read_cost_file(str(costs)))
    assert trace.runs[0].wide_bytes_per_second < math.inf and trace.summary.unpriced == 0
    assert estimates(trace.summary.lines()) == estimates(run.stdout.splitlines())


STAGES = ["--pipeline-model-parallel-size", 2]
EXPERTS = ["--num-experts", 4, "--moe-router-topk", 2, "--moe-token-dispatcher-type", "alltoall"]
EXPERTS += ["--moe-router-load-balancing-type", "none"]


@pytest.mark.parametrize(
    "model, grid, ranks", [([], STAGES, 2), (EXPERTS, TP2, 1)], ids=["pipeline", "experts"]
)
def test_with_stages_and_experts(model, grid, ranks, data, tmp_path):
    """Megatron's first weights depend on the stages: as many for the documents one by one."""
    flags = [*data, *LLAMA, *model]
    expected = train(tmp_path / "alone", *flags, *(grid if ranks > 1 else []), ranks=ranks)
    more = ["--paradyse-spread", 2, "--paradyse-policy", "random:4", "--use-distributed-optimizer"]
    run = train(tmp_path / "wide", *flags, *grid, *ROWS, *more, ranks=4)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(run.values(name), expected.values(name), rtol=1e-5)


NOT_WIDE = ["--paradyse-policy", "random:1", "--paradyse-strategies", "local_z"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--paradyse-spread", 2], "with --paradyse-sequences documents: only packed"),
        ([*ROWS, "--paradyse-spread", 3], "does not divide the 2 data-parallel replicas: use 2"),
        ([*ROWS, "--paradyse-spread", 0], "0 is not a number of replicas such as 4"),
        (
            [*ROWS, "--paradyse-spread", 2, "--paradyse-policy", "fixed:local_z"],
            "local_z cannot run attention over 2 replicas (--paradyse-spread): use megatron_cz",
        ),
        (
            [*ROWS, "--paradyse-spread", 2, *NOT_WIDE],
            "with local_z, none of which runs attention over several replicas",
        ),
    ],
)
def test_what_cannot_run_over_replicas_is_refused_in_one_line(flags, message, data, tmp_path):
    run = attempt(tmp_path, *data, *LLAMA, *flags, ranks=2)
    assert run.code == 2
    lines = [line for line in run.stderr.splitlines() if line.startswith("error")]
    assert lines and all(message in line for line in lines), run.stderr[-2000:]
