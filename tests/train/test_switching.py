"""Whatever the plan, the loss and the gradients are the same."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_paradyse.strategies import strategy_names
from tests.train.harness import LATENT, LLAMA, data_flags, run_forked, train, with_defaults

TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
TP4 = ["--tensor-model-parallel-size", 4, "--sequence-parallel"]
MODELS = {
    "gpt": (4, [*TP4, "--num-layers", 2]),
    "llama": (2, [
        *TP2, *LLAMA, "--qk-layernorm", "--softmax-type", "learnable", "--num-layers", 3,
        "--mtp-num-layers", 1,
    ]),
    "mqa-dropout": (
        2,
        [*TP2, "--group-query-attention", "--num-query-groups", 1, "--attention-dropout", 0.2,
         "--hidden-dropout", 0.1, "--no-bias-gelu-fusion", "--num-layers", 2],
    ),
    "gated-mqa": (2, [
        *TP2, *LLAMA, "--num-query-groups", 1, "--attention-output-gate", "--add-qkv-bias",
        "--qk-layernorm", "--num-layers", 2,
    ]),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_every_plan_gives_the_same_loss_and_gradients(model, tmp_path):
    """Uniform, mixed over layers, operations and microbatches, against stock Megatron; 1e-5."""
    ranks, flags = MODELS[model]
    flags = [*flags, "--paradyse"]
    code, stdout, stderr = run_forked(
        "tests.train.compare_plans",
        with_defaults(flags),
        ranks=ranks,
        folder=tmp_path,
        timeout_seconds=240,
    )
    assert code == 0, stdout[-2000:] + stderr[-4000:]
    expected = 2 * len(strategy_names()) + 5
    if "dropout" not in model:
        expected += 1  # stock Megatron
    if ranks == 2 and "dropout" not in model:
        expected += len(strategy_names()) + 1  # what recomputes, in tiles
    assert stdout.count("compared ") == expected, stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    lengths = np.random.default_rng(3).integers(2, 90, size=200).tolist()
    return [*data_flags(tmp_path_factory.mktemp("data"), lengths), "--lr", "1e-3"]


RANDOM = ["--paradyse-policy", "random:1"]
SOME_OFFLOAD = ["--paradyse-strategies", "megatron_ts,ulysses_z+offload,metp+recompute,metp"]


def test_fifty_iterations_of_random_plans_follow_stock_megatron(tmp_path):
    """Another plan for every microbatch, layer and operation; losses within 1e-4 all the way."""
    flags = ["--mock-data", *TP2, "--train-iters", 50, "--lr", "1e-3", "--num-layers", 2]
    ours = ["--paradyse", "--paradyse-sequences", "fixed", *RANDOM]
    stock = train(tmp_path / "stock", *flags, ranks=2)
    run = train(tmp_path / "ours", *flags, *ours, ranks=2)
    assert len(stock.records) == 50
    np.testing.assert_allclose(run.values("loss"), stock.values("loss"), rtol=1e-4)


YARN = ["--position-embedding-type", "yarn", "--rotary-scaling-factor", 8]
YARN += ["--yarn-original-max-position-embeddings", 16, "--no-rope-fusion"]
FOUR_MICROBATCHES = ["--global-batch-size", 8]  # of two replicas: two each
MACHINERY = {
    "overlapped distributed optimizer": (4, [
        *TP2, "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
        "--ddp-bucket-size", 2000, *FOUR_MICROBATCHES,
    ]),
    "pipeline, full recomputation": (4, [
        *TP2, "--pipeline-model-parallel-size", 2, "--recompute-granularity", "full",
        "--recompute-method", "block", "--recompute-num-layers", 1, *FOUR_MICROBATCHES,
    ]),
    "stages without layers": (2, [
        "--pipeline-model-parallel-size", 2, "--pipeline-model-parallel-layout", "E|tt|tt|mmL",
        "--mtp-num-layers", 2, "--position-embedding-type", "rope", *FOUR_MICROBATCHES,
    ]),
    "pipeline, offload": (4, [*TP2, "--pipeline-model-parallel-size", 2]),
    "mixture of experts": (2, [
        *TP2, "--num-experts", 4, "--moe-router-topk", 2, "--moe-token-dispatcher-type", "alltoall",
        "--moe-router-load-balancing-type", "none", "--disable-bias-linear",
    ]),
    "experts over replicas": (4, [
        *TP2, "--num-experts", 4, "--moe-router-topk", 2, "--moe-token-dispatcher-type", "alltoall",
        "--expert-model-parallel-size", 4, "--expert-tensor-parallel-size", 1,
        "--moe-router-load-balancing-type", "none", "--disable-bias-linear", *FOUR_MICROBATCHES,
    ]),
    "selective recomputation": (2, [
        *TP2, "--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mlp",
    ]),
    "norms that a spec leaves out": (2, [*TP2, "--qk-l2-norm"]),
    "positions of YaRN": (2, [*TP2, *YARN]),
    "gates of the output": (2, [
        *TP2, "--attention-output-gate", "--group-query-attention", "--num-query-groups", 2,
        "--use-distributed-optimizer",
    ]),
}  # fmt: skip


@pytest.mark.parametrize("machinery", MACHINERY)
def test_switching_under_megatrons_own_machinery(machinery, data, tmp_path):
    """Random plans against fixed:megatron_ts, with gradient accumulation over microbatches."""
    ranks, flags = MACHINERY[machinery]
    flags = ["--train-iters", 3, *flags]
    fixed = train(tmp_path / "fixed", *data, *flags, ranks=ranks)
    run = train(tmp_path / "random", *data, *flags, *RANDOM, *SOME_OFFLOAD, ranks=ranks)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(run.values(name), fixed.values(name), rtol=1e-4)


OF_LATENTS = {
    "YaRN, packed": [
        "--paradyse-sequences", "packed", "--paradyse-pack-tokens", 96, "--micro-batch-size", 1,
        "--rope-type", "yarn", "--rotary-scaling-factor", 8, "--max-position-embeddings", 256,
    ],
    "overlapped distributed optimizer": [
        "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
        "--ddp-bucket-size", 2000, "--rope-type", "rope", "--mtp-num-layers", 1,
    ],
}  # fmt: skip


@pytest.mark.parametrize("flags", OF_LATENTS)
def test_latent_attention_trains_on_two_ranks_as_on_one(flags, data, tmp_path):
    """Megatron's own cannot be built without TransformerEngine; tests/test_latent_attention.py."""
    flags = [*data, *LATENT, *OF_LATENTS[flags]]
    one = train(tmp_path / "one", *flags, ranks=1)
    two = train(tmp_path / "two", *flags, *TP2, *RANDOM, *SOME_OFFLOAD, ranks=2)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(two.values(name), one.values(name), rtol=1e-4)
