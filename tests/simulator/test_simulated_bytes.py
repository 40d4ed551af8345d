"""Simulated bytes are those that a profile of the same layers counts on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_paradyse.costs.layers import LAYER, half_of, layer_of
from megatron_paradyse.costs.recomputed import recomputed_layer
from megatron_paradyse.profiler.flags import megatron_flags
from megatron_paradyse.simulator.even_experts import num_ranks
from megatron_paradyse.strategies import recomputes
from megatron_paradyse.strategies.sizes import TILE_ROWS
from tests.simulator.small_models import COMMON, GPT, LENGTH, simulated
from tests.train.harness import run_forked

TOLERANCE = 0.01
LLAMA = [
    *("--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 8, "--vocab-size", 96),
    *("--group-query-attention", "--num-query-groups", 2, "--ffn-hidden-size", 96, "--swiglu"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
    "--untie-embeddings-and-output-weights",
]
LATENT = [  # norms of the layer's input before queries, as DeepSeek-V2-Lite by Megatron
    *("--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 8, "--vocab-size", 96),
    *("--multi-latent-attention", "--kv-lora-rank", 16, "--qk-head-dim", 12, "--v-head-dim", 12),
    *("--qk-pos-emb-head-dim", 8, "--qk-layernorm", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--rope-type", "yarn", "--no-rope-fusion"),
    *("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
]
BERT = [*GPT, "--paradyse-model", "bert"]
DIFFERING = [*LLAMA, "--num-layers", 4, "--window-size", "31,0"]
DIFFERING += ["--window-attn-skip-freq", "[0,1,0,1]", "--no-rope-freq", "[0,0,1,0]"]
PREDICTING = ["--mtp-num-layers", 2]


EXPERTS = [*LLAMA, "--num-experts", 4, "--moe-router-topk", 2, "--moe-ffn-hidden-size", 48]
EXCHANGED = [*EXPERTS, "--moe-token-dispatcher-type", "alltoall"]
OVER_RANKS = [*EXCHANGED, "--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1]
OVER_REPLICAS = [*EXCHANGED, "--expert-model-parallel-size", 2]  # 2 ranks have an expert
PADDED = ["--moe-expert-capacity-factor", 1.5, "--moe-pad-expert-input-to-capacity"]
SHARED = ["--moe-shared-expert-intermediate-size", 32, "--moe-layer-freq", "[0,1]"]


def _on_real_ranks(folder: Path, flags: list, p: int, tile_rows: int) -> list:
    folder.mkdir()
    output = folder / "real.json"
    given = [str(flag) for flag in [*flags, *COMMON]]
    argv = [
        str(output),
        str(LENGTH),
        str(tile_rows),
        *megatron_flags(given, model_path=None, ranks=p),
    ]
    code, _, stderr = run_forked(
        "tests.simulator.real_rank",
        argv,
        ranks=num_ranks(given, p),
        folder=folder,
        timeout_seconds=100,
    )
    assert code == 0, stderr[-4000:]
    return json.loads(output.read_text())


LONG = 24  # rows of a tile: a sequence of two tiles and a half on 2 ranks
CASES = {
    "gpt-2": (GPT, 2, TILE_ROWS),
    "llama-4": (LLAMA, 4, TILE_ROWS),
    "gated-2": ([*LLAMA, "--attention-output-gate", "--qk-layernorm"], 2, TILE_ROWS),
    "latents-2": (LATENT, 2, TILE_ROWS),
    "bert-2": (BERT, 2, TILE_ROWS),
    "differing-predicting-2": ([*DIFFERING, *PREDICTING], 2, TILE_ROWS),
    "predicting-2": ([*LLAMA, *PREDICTING, "--paradyse-head-tile", 96], 2, TILE_ROWS),
    "long-gpt-2": (GPT, 2, LONG),
    "experts-gathered-2": ([*EXPERTS, *SHARED], 2, TILE_ROWS),
    "experts-over-replicas-2": (OVER_REPLICAS, 2, TILE_ROWS),
    "experts-padded-2": ([*OVER_RANKS, *PADDED], 2, TILE_ROWS),
}


@pytest.mark.parametrize(("flags", "p", "tile_rows"), CASES.values(), ids=CASES)
def test_bytes_are_those_of_real_ranks(flags, p, tile_rows, tmp_path):
    """Of every strategy, with and without recompute, and of embedding and head.

    And a layer whose halves recompute holds what follows from the halves.
    """
    table = simulated(tmp_path / "fake", flags, p, tile_rows=tile_rows)
    fake = {(m.strategy, m.operation): m for m in table.measurements}
    costs = {key: m.costs for key, m in fake.items()}
    wrong = []
    for strategy, operation, real in _on_real_ranks(tmp_path / "real", flags, p, tile_rows):
        if half_of(operation) == LAYER:
            if recomputes(strategy):
                of = table.description.layer_kinds.operations(layer_of(operation))
                layer = recomputed_layer(strategy, strategy, lambda *key: costs[key], of)
                for name, truth in real.items():
                    assert getattr(layer, name) == pytest.approx(truth, rel=0.02), strategy
            continue
        m = fake.pop((strategy, operation))
        assert m.is_ok, m
        for name, truth in real.items():
            got = getattr(m, name)
            if got != pytest.approx(truth, rel=TOLERANCE, abs=64):
                wrong.append((strategy, operation, name, got, truth, f"{got / truth:.3f}"))
    assert not wrong, "\n" + "\n".join(map(str, wrong))
    assert not fake
