"""Packed rows through a GPT of Megatron's equal their documents one by one through stock layers."""

from __future__ import annotations

import pytest

from tests.train.harness import LLAMA, run_forked, with_defaults

YARN = ["--position-embedding-type", "yarn", "--rotary-scaling-factor", 8]
OF_LLAMA = [*LLAMA, *YARN, "--qk-layernorm", "--softmax-type", "learnable"]
MORE_TOKENS = ["--mtp-num-layers", 1, "--position-embedding-type", "rope", "--num-layers", 2]
MODELS = {
    "gpt": (2, ["--num-layers", 3]),
    "llama": (2, ["--num-layers", 3, *OF_LLAMA]),
    "gated": (4, ["--num-layers", 3, *LLAMA, "--attention-output-gate", "--num-query-groups", 2]),
    "more tokens predicted": (2, MORE_TOKENS),
    "more tokens predicted in tiles": (2, [*MORE_TOKENS, "--paradyse-head-tile", 10]),
}


@pytest.mark.parametrize("model", MODELS)
def test_rows_equal_their_documents_under_every_plan(model, tmp_path):
    """Losses and every gradient to 1e-5; documents of ours and of Megatron's packed sequences."""
    ranks, flags = MODELS[model]
    flags = [*flags, "--tensor-model-parallel-size", ranks, "--sequence-parallel", "--paradyse"]
    code, stdout, stderr = run_forked(
        "tests.train.compare_rows",
        with_defaults(["--paradyse-head-tile", "off", *flags, "--global-batch-size", 2]),
        ranks=ranks,
        folder=tmp_path,
        timeout_seconds=120,
    )
    assert code == 0, stdout[-2000:] + stderr[-4000:]
    assert stdout.count("compared ") == 5 * 4, stdout
    assert stdout.count("compared in shards, ") == 4 and "local_z" in stdout
