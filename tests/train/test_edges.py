"""Loss head and embedding in tiles train as stock Megatron's do, with its parameters."""

from __future__ import annotations

import numpy as np
import pytest

from tests.train.harness import LLAMA, run_forked, train, with_defaults

TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
TP4 = ["--tensor-model-parallel-size", 4, "--sequence-parallel"]
MUP = ["--use-mup", "--mup-base-hidden-size", 16, "--mup-embedding-mult", 3]
ROPE = ["--position-embedding-type", "rope"]
# Of the norm of each parameter's gradient, the loss and the logits. bfloat16 has roundings of
# 2^-9 = 2e-3, a few of which meet in every gradient.
MODELS = {
    "tp1, tied": (1, 1e-5, []),
    "tp2, tied, positions learned": (2, 1e-5, TP2),
    "tp2, tied, one sequence": (2, 1e-5, [*TP2, *ROPE, "--micro-batch-size", 1]),
    "tp4, untied, more tokens predicted": (4, 1e-5, [*TP4, *LLAMA, "--mtp-num-layers", 2]),
    "tp2, untied, MuP": (2, 1e-5, [*TP2, *LLAMA, *MUP, "--mtp-num-layers", 1]),
    "tp2, untied, bfloat16": (2, 1e-2, [*TP2, *LLAMA, "--bf16"]),
}


@pytest.mark.parametrize("model", MODELS)
def test_loss_logits_and_every_gradient_equal_stock_megatron(model, tmp_path):
    ranks, tolerance, flags = MODELS[model]
    # The script attaches the tiles itself, beside a model without.
    flags = [*flags, "--paradyse", "--paradyse-head-tile", "off", "--num-layers", 2]
    batch = 3 if "--micro-batch-size" in flags else 6  # three microbatches
    code, stdout, stderr = run_forked(
        "tests.train.compare_edges",
        [str(tolerance), *with_defaults([*flags, "--global-batch-size", batch])],
        ranks=ranks,
        folder=tmp_path,
        timeout_seconds=120,
    )
    assert code == 0, stdout[-2000:] + stderr[-4000:]
    assert "worst of" in stdout


GRIDS = {
    "tp2-pp2, tied": (4, [*TP2, *ROPE, "--pipeline-model-parallel-size", 2]),
    "tp2-dp2, untied, overlapped": (4, [
        *TP2, *LLAMA, "--use-distributed-optimizer", "--overlap-grad-reduce",
        "--overlap-param-gather",
    ]),
}  # fmt: skip
TWO_LAYERS = ["--mock-data", "--num-layers", 2]
OURS = ["--paradyse", "--paradyse-sequences", "fixed", "--paradyse-head-tile", 24]


@pytest.mark.parametrize("grid", GRIDS)
def test_training_in_tiles_equals_stock_megatron(grid, tmp_path):
    ranks, flags = GRIDS[grid]
    stock = train(tmp_path / "stock", *TWO_LAYERS, *flags, ranks=ranks)
    ours = train(tmp_path / "ours", *TWO_LAYERS, *flags, *OURS, ranks=ranks)
    assert len(stock.records) == 4
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(ours.values(name), stock.values(name), rtol=1e-5)


def test_a_stock_checkpoint_continues_in_tiles(tmp_path):
    flags = [*TP2, *LLAMA, *TWO_LAYERS]
    whole = train(tmp_path / "whole", *flags, ranks=2)
    save = ["--save", tmp_path / "saved", "--save-interval", 2, "--exit-interval", 2]
    train(tmp_path / "a", *flags, *save, ranks=2)
    resumed = train(tmp_path / "b", *flags, *OURS, "--load", tmp_path / "saved", ranks=2)
    assert [record["iteration"] for record in resumed.records] == [3, 4]
    np.testing.assert_allclose(resumed.values("loss"), whole.values("loss")[2:], rtol=1e-5)
