"""Iterations of whole models as the profile predicts them, against their measured time and peak.

Operations and iterations are measured in turns, in the same processes, so that a busy machine
slows both: the error is that of the arithmetic (parts to whole), without a fitted model between.
With --differ the layers of the model are of three kinds.

    .venv/bin/python benchmarks/whole_model.py --json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import count, finish, options, spawn

MODEL = {
    "--num-layers": 4,
    "--hidden-size": 256,
    "--num-attention-heads": 8,
    "--seq-length": 8192,
    "--max-position-embeddings": 8192,
    "--vocab-size": 257,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
}
# Layers 2 and 4 see a window of tokens, layer 3 has no positions.
DIFFERING = {
    "--position-embedding-type": "rope",
    "--no-rope-fusion": "",
    "--window-size": "255,0",
    "--window-attn-skip-freq": "[0,1,0,1]",
    "--no-rope-freq": "[0,0,1,0]",
}
RANKS = 4
NUM_LENGTHS = 20


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=count, default=3, help="timed iterations of each plan")
    parser.add_argument("--plans", type=count, default=4, help="plans at each length")
    parser.add_argument("--differ", action="store_true", help="a model whose layers differ")
    arguments = parser.parse_args()
    model = MODEL | DIFFERING if arguments.differ else MODEL
    lengths = [128, 512] if arguments.quick else _log_spaced(128, 3072, NUM_LENGTHS)
    task = {"lengths": lengths, "rounds": arguments.rounds, "plans": arguments.plans}
    if arguments.quick:
        task |= {"rounds": 2, "plans": 2}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        os.environ["WHOLE_MODEL"] = json.dumps({**task, "output": str(output)})
        flags = [str(text) for pair in model.items() for text in pair if text != ""]
        spawn("benchmarks.whole_model_rank", flags, ranks=RANKS, timeout_seconds=1800)
        measured = json.loads(output.read_text())
    rows = measured["rows"]
    times = [row["time_error"] for row in rows]
    memories = [row["memory_error"] for row in rows]
    result = {
        "time_median": statistics.median(map(abs, times)),
        "time_bias": statistics.median(times),
        "time_p95": sorted(map(abs, times))[int(0.95 * (len(times) - 1))],
        "time_noise": statistics.median(row["measured_spread"] for row in rows),
        "processor_time_median": statistics.median(abs(row["processor_error"]) for row in rows),
        "processor_time_bias": statistics.median(row["processor_error"] for row in rows),
        "memory_max": max(map(abs, memories)),
        "memory_median": statistics.median(map(abs, memories)),
        "static_error": measured["static_error"],
        "plans": len(rows),
        "lengths": len(lengths),
        "rows": rows,
    }
    name = "whole_model_differ" if arguments.differ else "whole_model"
    finish(name, result, {"ranks": RANKS, **task, **model}, arguments)


def _log_spaced(shortest: int, longest: int, count: int) -> list[int]:
    step = 2 * RANKS
    ratio = (longest / shortest) ** (1 / (count - 1))
    return [round(shortest * ratio**i / step) * step for i in range(count)]


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
