"""Every configuration of a known model trains: with its own flags, at the size of a toy."""

from __future__ import annotations

import pytest

from megatron_paradyse.train_command import read_run
from tests.train.harness import ROOT, train, write_documents

CONFIGS = sorted((ROOT / "configs" / "models").glob("*.yaml"))
TOY = {
    "--num-layers": 2,
    "--hidden-size": 64,
    "--num-attention-heads": 8,
    "--num-query-groups": 4,
    "--kv-channels": 8,
    "--ffn-hidden-size": 96,
    "--kv-lora-rank": 16,
    "--qk-head-dim": 8,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 8,
    "--num-experts": 4,
    "--moe-layer-freq": "[0,1]",
    "--moe-ffn-hidden-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
    "--moe-router-topk": 2,
    "--expert-model-parallel-size": 2,
    "--tensor-model-parallel-size": 2,
    "--seq-length": 128,
    "--max-position-embeddings": 128,
    "--global-batch-size": 2,
    "--train-iters": 1,
    "--lr-warmup-iters": 0,
    "--paradyse-policy": "random:1",  # instead of costs
}
# Stages would need more ranks; bfloat16 is a GPU's business.
DROPPED = ("--pipeline-model-parallel-size", "--paradyse-trace")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_model_trains_with_the_flags_of_its_configuration(config, tmp_path):
    write_documents(tmp_path / "corpus", [20, 100, 64, 7])
    command = read_run(str(config)).command
    flags = toy(command[command.index("megatron_paradyse.pretrain_gpt") + 1 :])
    flags += ["--data-path", str(tmp_path / "corpus"), "--split", "100,0,0", "--num-workers", "0"]
    run = train(tmp_path / "run", *flags, ranks=2)
    assert len(run.records) == 1 and run.values("loss")[0] > 1


def toy(flags: list[str]) -> list[str]:
    found: list[str] = []
    dropped = [*DROPPED, "--bf16"]
    for flag in flags:
        if flag.startswith("--"):
            name, keep = flag, flag not in dropped
        elif keep and name in TOY:
            flag = str(TOY[name])
        if keep:
            found.append(flag)
    return found
