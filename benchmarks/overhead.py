"""One iteration of ours (fixed:megatron_ts, documents) over stock Megatron's on equal work.

Both models live in the same processes and take turns, iteration by iteration, each with its own
data path and the same attention kernel; the ratio is taken pair by pair.

    .venv/bin/python benchmarks/overhead.py --json
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

from benchmarks.common import finish, options, spawn

MODEL = {
    "--num-layers": 4,
    "--hidden-size": 256,
    "--num-attention-heads": 8,
    "--seq-length": 4096,
    "--max-position-embeddings": 4096,
    "--micro-batch-size": 1,
    "--global-batch-size": 2,
    "--train-iters": 1000,
    "--lr": "1e-4",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": 1024,
    "--eval-iters": 0,
    "--eval-interval": 1000,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
    "--tensor-model-parallel-size": 2,
}
RANKS = 2


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    lengths = {256: 8, 1024: 8} if arguments.quick else {128: 60, 512: 40, 2048: 24, 4096: 16}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "ratios.json"
        os.environ["OVERHEAD"] = json.dumps({"lengths": lengths, "output": str(output)})
        flags = [str(text) for pair in MODEL.items() for text in pair]
        flags += ["--sequence-parallel", "--paradyse", "--paradyse-policy", "fixed:megatron_ts"]
        spawn("benchmarks.overhead_rank", flags, ranks=RANKS, timeout_seconds=900)
        rows = json.loads(output.read_text())
    medians = [row["ratio_median"] for row in rows]
    result = {
        "ratio_median": statistics.median(medians),
        "ratio_min": min(medians),
        "ratio_max": max(medians),
        "rows": rows,
    }
    finish("overhead", result, {"ranks": RANKS, **MODEL}, arguments)


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
