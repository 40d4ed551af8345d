"""fixed:megatron_ts on fixed lengths is stock Megatron: losses, gradient norms, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

from tests.train.harness import LLAMA, train

OURS = ["--paradyse", "--paradyse-sequences", "fixed", "--paradyse-policy", "fixed:megatron_ts"]
TWO_LAYERS = ["--mock-data", "--num-layers", 2, "--global-batch-size", 8]
TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
GRIDS = {
    "tp1": (1, []),
    "tp2": (2, TP2),
    "tp4-llama": (4, ["--tensor-model-parallel-size", 4, "--sequence-parallel", *LLAMA]),
    "tp2-pp2": (4, [*TP2, "--pipeline-model-parallel-size", 2]),
    "tp2-dp2-llama": (4, [*TP2, *LLAMA, "--use-distributed-optimizer"]),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_losses_and_gradient_norms_equal_stock_megatron(grid, tmp_path):
    ranks, flags = GRIDS[grid]
    flags = [*TWO_LAYERS, "--train-iters", 3, *flags]
    stock = train(tmp_path / "stock", *flags, ranks=ranks)
    ours = train(tmp_path / "ours", *flags, *OURS, ranks=ranks)
    assert len(stock.records) == 3
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(ours.values(name), stock.values(name), rtol=1e-5)
    assert stock.values("loss")[-1] < stock.values("loss")[0]  # it did train


def test_a_window_without_an_end_is_no_window(tmp_path):
    """Where Megatron's own attention in PyTorch would hide every key."""
    flags = [*TWO_LAYERS, *TP2]
    stock = train(tmp_path / "stock", *flags, ranks=2)
    random = [*OURS[:-1], "random:1", "--window-size", "(-1,0)"]
    ours = train(tmp_path / "ours", *flags, *random, ranks=2)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(ours.values(name), stock.values(name), rtol=1e-5)


@pytest.mark.parametrize("first, second", [("stock", "ours"), ("ours", "stock")])
def test_checkpoint_of_one_continues_in_the_other(first, second, tmp_path):
    """Save after 2 of 4 iterations with one, load with the other: the same last 2 iterations."""
    flags = [*TP2, *TWO_LAYERS, "--softmax-type", "learnable"]  # with a parameter of its own
    flags += ["--mtp-num-layers", 1, "--position-embedding-type", "rope", "--attention-output-gate"]
    extra = {"stock": [], "ours": OURS}
    whole = train(tmp_path / "whole", *flags, *extra[first], ranks=2)
    checkpoint = ["--save", tmp_path / "saved", "--save-interval", 2]
    train(tmp_path / "a", *flags, *extra[first], *checkpoint, "--exit-interval", 2, ranks=2)
    resumed = train(tmp_path / "b", *flags, *extra[second], "--load", tmp_path / "saved", ranks=2)
    assert [record["iteration"] for record in resumed.records] == [3, 4]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(resumed.values(name), whole.values(name)[2:], rtol=1e-5)


OPTIMIZERS = {
    "torch_dist": ["--use-distributed-optimizer"],
    "torch": ["--use-distributed-optimizer", "--ckpt-format", "torch"],
    "SGD": ["--optimizer", "sgd", "--num-layers", 1],
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_goes_on_from_a_checkpoint_that_megatron_alone_cannot_load(
    optimizer, tmp_path
):
    """The distributed one with PyTorch's Adam, and SGD with its momenta."""
    flags = [*TWO_LAYERS, *OURS, *OPTIMIZERS[optimizer]]
    saved = ["--save", tmp_path / "saved", "--save-interval", 2]
    whole = train(tmp_path / "whole", *flags, *saved, ranks=2)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(tmp_path / "b", *flags, "--load", tmp_path / "saved", ranks=2)
    assert [record["iteration"] for record in resumed.records] == [3, 4]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(resumed.values(name), whole.values(name)[2:], rtol=1e-6)
