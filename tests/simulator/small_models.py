"""Simulated tables of small models."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.costs.table import CostTable
from megatron_paradyse.profiler.run import strategies_to_profile
from tests.train.harness import run_forked

LENGTH = 128
GPT = ["--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 8, "--vocab-size", 96]
GPT += ["--paradyse-head-tile", 32]  # in several tiles
COMMON = ["--seq-length", 512, "--max-position-embeddings", 512]
COMMON += ["--attention-dropout", 0, "--hidden-dropout", 0]


def simulated(folder: Path, flags: list, p: int, **more) -> CostTable:
    """The table of a small model, of eager kernels in float32 unless told."""
    output = folder / "simulated.json"
    options = {"output": str(output), "p": p, "lengths": (LENGTH,), "dtype": "float32"}
    options |= {"strategies": strategies_to_profile(None), "fused": False}
    options |= {"flags": [str(flag) for flag in [*flags, *COMMON]], **more}
    code, _, stderr = run_forked(
        "tests.simulator.driver", [json.dumps(options)], ranks=1, folder=folder, timeout_seconds=100
    )
    assert code == 0, stderr[-4000:]
    return read_cost_file(output).table
