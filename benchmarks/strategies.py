"""Seconds, bytes sent and bytes held of one layer, forward and backward, under every strategy.

On a machine without a GPU: 2 and 4 gloo ranks. The strategies take turns in one process group, so
that whatever else the machine does meets all of them. On a GPU: as rank 7 of 8, in a process group
that moves nothing, which receives its own values again; seconds are then those of the kernels.

    .venv/bin/python benchmarks/strategies.py --json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TypedDict

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, options, spawn


class Plan(TypedDict):
    """grid: name, sizes, and rounds by length of each layer."""

    ranks: list[int]
    grid: list[tuple[str, dict[str, int], dict[int, int]]]


GPT = {"h": 256, "n": 8, "g": 8, "f": 1024, "gated": False}
LLAMA = {"h": 256, "n": 8, "g": 2, "f": 688, "gated": True}
LARGE = {"h": 4096, "n": 32, "g": 32, "f": 16384, "gated": False}
QUICK: Plan = {"ranks": [2], "grid": [("gpt", GPT, {128: 3, 512: 3})]}
FULL: Plan = {
    "ranks": [2, 4],
    "grid": [
        ("gpt", GPT, {128: 21, 512: 15, 2048: 9, 4096: 5}),
        ("llama", LLAMA, {512: 11, 2048: 7}),
    ],
}
ON_GPU: Plan = {
    "ranks": [8],
    "grid": [("large", LARGE, {2**13: 9, 2**14: 9, 2**15: 9, 2**16: 7, 2**17: 5, 2**18: 3})],
}
QUICK_ON_GPU: Plan = {"ranks": [8], "grid": [("large", LARGE, {8192: 3})]}


def main() -> None:
    import torch

    arguments = options(__doc__.splitlines()[0]).parse_args()
    gpu = torch.cuda.is_available()
    plan = (QUICK_ON_GPU if gpu else QUICK) if arguments.quick else (ON_GPU if gpu else FULL)
    rows = []
    for p in plan["ranks"]:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows.json"
            task = {"grid": plan["grid"], "output": str(output), "stand_in": p if gpu else None}
            os.environ["STRATEGIES"] = json.dumps(task)
            ranks = 1 if gpu else p
            spawn("benchmarks.strategies_rank", [], ranks=ranks, timeout_seconds=600)
            rows += json.loads(output.read_text())
    configuration = {**plan, "causal": True, "dtype": "bfloat16" if gpu else "float32"}
    finish("strategies", {"rows": rows}, configuration, arguments)


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
