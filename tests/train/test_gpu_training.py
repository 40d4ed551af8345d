"""On a CUDA device: real trainings of one rank, NCCL and all, against stock Megatron's.

A rank alone communicates with nobody; what differs from the CPU are the kernels, streams, pinned
memory, the allocator and costs that are measured.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.train.harness import LLAMA, train, write_documents

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FLAGS = ["--hidden-size", 256, "--num-attention-heads", 4, "--seq-length", 512, "--lr", "1e-3"]
FLAGS += ["--transformer-impl", "local", "--no-gradient-accumulation-fusion"]
FLAGS += ["--no-persist-layer-norm", "--no-rope-fusion", "--no-masked-softmax-fusion"]
FLAGS += ["--attention-softmax-in-fp32", "--train-iters", 6]
FIXED = ["--mock-data", "--paradyse-sequences", "fixed"]
OFFLOAD = "ulysses_z+offload,metp+offload,megatron_ts,megatron_cz+recompute"
POLICIES = {
    "megatron_ts": ["--paradyse-policy", "fixed:megatron_ts"],
    "random": ["--paradyse-policy", "random:1"],
    "offload": ["--paradyse-policy", "random:1", "--paradyse-strategies", OFFLOAD],
}
MODELS = {"gpt": [], "llama": [*LLAMA, "--num-query-groups", 2, "--qk-layernorm"]}
DTYPES = {"float32": [], "bfloat16": ["--bf16"]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_training_on_cuda_follows_stock_megatron(model, dtype, tmp_path):
    """Losses of every iteration, float32 to 1e-4; bfloat16 to 1%, which rounds otherwise."""
    flags = [*FLAGS, *MODELS[model], *DTYPES[dtype]]
    stock = train(tmp_path / "stock", *flags, "--mock-data", ranks=1)
    assert len(stock.records) == 6
    tolerance = 1e-4 if dtype == "float32" else 1e-2
    for name, policy in POLICIES.items():
        ours = train(tmp_path / name, *flags, *FIXED, "--paradyse", *policy, ranks=1)
        np.testing.assert_allclose(
            ours.values("loss"), stock.values("loss"), rtol=tolerance, err_msg=name
        )


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    write_documents(prefix, np.random.default_rng(3).integers(2, 1500, size=200).tolist())
    return ["--data-path", prefix, "--split", "100,0,0", "--seq-length", 2048]


def test_documents_train_alike_whatever_the_plan(documents, tmp_path):
    flags = [*FLAGS, *MODELS["llama"], *documents, "--paradyse"]
    found = {
        name: train(tmp_path / name, *flags, *policy, ranks=1).values("loss")
        for name, policy in POLICIES.items()
    }
    for name in ("random", "offload"):
        np.testing.assert_allclose(found[name], found["megatron_ts"], rtol=1e-4, err_msg=name)


def test_costs_are_measured_at_the_start_and_chosen_by(documents, tmp_path):
    flags = [*FLAGS, *MODELS["llama"], *documents, "--bf16", "--paradyse"]
    run = train(tmp_path, *flags, "--paradyse-policy", "optimal", ranks=1)
    assert len(run.records) == 6 and np.isfinite(run.values("loss")).all()
    assert "estimated by the cost" in run.stdout
