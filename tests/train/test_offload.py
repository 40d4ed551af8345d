"""Trainings whose layers' inputs wait in host memory: what they take of the device's."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.train.harness import train

SEQ_LENGTH, HIDDEN, LAYERS, RANKS = 1024, 64, 6, 2
INPUT = SEQ_LENGTH // RANKS * HIDDEN * 4  # bytes of a layer's input on a rank, float32


def peaks(folder, policy: str, budget: str):
    """(losses, measured peaks of the microbatches) under an enforced budget."""
    trace = folder / "trace.jsonl"
    flags = ["--mock-data", "--tensor-model-parallel-size", RANKS, "--sequence-parallel"]
    flags += ["--num-layers", LAYERS, "--hidden-size", HIDDEN, "--seq-length", SEQ_LENGTH]
    flags += ["--micro-batch-size", 1, "--global-batch-size", 1, "--train-iters", 2]
    flags += ["--paradyse", "--paradyse-sequences", "fixed", "--paradyse-policy", policy]
    flags += ["--paradyse-trace", trace, "--paradyse-memory-budget", budget]
    run = train(folder, *flags, ranks=RANKS)
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    return run.values("loss"), [r["peak_bytes"] for r in records if r["kind"] == "microbatch"]


def test_a_budget_lower_by_the_inputs_of_all_layers_but_one_is_enough(tmp_path):
    """The same losses; the input of the layer whose backward runs is on the device."""
    losses, kept = peaks(tmp_path / "kept", "fixed:metp+recompute", "1GiB")
    saved = (LAYERS - 1) * INPUT
    budget = max(kept) - saved + INPUT // 20
    same, offloaded = peaks(tmp_path / "offloaded", "fixed:metp+offload", f"{budget}B")
    np.testing.assert_allclose(same, losses, rtol=1e-6)
    for more, less in zip(kept, offloaded, strict=True):
        assert more - less == pytest.approx(saved, rel=0.01)
