"""Profiles of a small model on ranks of this machine."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.profiler.flags import megatron_flags
from tests.train.harness import run_forked

RANKS, HIDDEN = 2, 64
LENGTHS = (64, 128)
STRATEGIES = ("megatron_ts", "megatron_ts+recompute", "megatron_ts+offload", "ulysses_z", "metp")
MODEL = {
    "--num-layers": 6,
    "--hidden-size": HIDDEN,
    "--num-attention-heads": 4,
    "--seq-length": 512,
    "--max-position-embeddings": 512,
    "--vocab-size": 96,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
}
ROPE = {"--position-embedding-type": "rope", "--no-rope-fusion": ""}
LATENT = {"--multi-latent-attention": "", "--q-lora-rank": 24, "--kv-lora-rank": 16}
LATENT |= {"--qk-head-dim": 12, "--qk-pos-emb-head-dim": 8, "--v-head-dim": 16, **ROPE}


def run_profile(output: Path, *, fault: str = "", code: int = 0, model: dict | None = None, **more):
    """Returns (measurements by key, events, stderr) of a profile, or (None, None, stderr)."""
    options = {"output": str(output), "lengths": LENGTHS, "strategies": STRATEGIES}
    options |= {"seconds_per_point": 0.02, "agree_seconds": 3, **more}
    given = (MODEL | (model or {})).items()
    flags = [str(text) for pair in given for text in pair if text != ""]
    argv = [json.dumps(options), fault, *megatron_flags(flags, model_path=None, ranks=RANKS)]
    ended, _, stderr = run_forked(
        "tests.profiler.driver", argv, ranks=RANKS, folder=output.parent, timeout_seconds=120
    )
    assert ended == code, stderr[-4000:]
    if code:
        return None, None, stderr
    table = read_cost_file(output).table
    found = {(m.strategy, m.operation, m.seq_length): m for m in table.measurements}
    return found, json.loads(Path(f"{output}.events").read_text()), stderr
