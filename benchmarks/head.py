"""The loss head in tiles against Megatron's: bytes, seconds, differences; the embedding's bytes.

Bytes are counted on fake tensors, in bfloat16, as rank p-1 of p (simulated: no GPU). Seconds and
differences are of CPU ranks in float32, both heads in the same processes, in turns.

    .venv/bin/python benchmarks/head.py --json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, options, spawn

GIB = 2**30
# Vocabularies as Megatron pads them: 50,257 to 51,200 for p = 8.
MODELS = {
    "gpt at 624K, the paper's longest document": {"s": 624 * 1024, "h": 12288, "v": 51200, "p": 8},
    "gpt at 1M": {"s": 2**20, "h": 12288, "v": 51200, "p": 8},
    "gpt at 1M, v = 128K": {"s": 2**20, "h": 12288, "v": 2**17, "p": 8},
    "llama at 2M, v = 128K": {"s": 2**21, "h": 8192, "v": 2**17, "p": 8},
}
SHAPES = [
    {"s": 4096, "h": 256, "v": 8192, "tile": 1024},
    {"s": 8192, "h": 256, "v": 16384},
    {"s": 4096, "h": 1024, "v": 16384},
]


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    shapes, pairs, ranks = (SHAPES[:1], 5, (2,)) if arguments.quick else (SHAPES, 7, (1, 2))
    bytes_rows = count_bytes(dict(list(MODELS.items())[:1]) if arguments.quick else MODELS)
    rows = []
    for p in ranks:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows.json"
            task = {"shapes": shapes, "pairs": pairs, "output": str(output)}
            os.environ["HEAD"] = json.dumps(task)
            spawn("benchmarks.head_rank", [], ranks=p, timeout_seconds=600)
            rows += json.loads(output.read_text())
    result = {
        "workspace_fraction_of_80gib": bytes_rows[0]["workspace_fraction_of_80gib"],
        "time_ratio": max(row["time_ratio"] for row in rows),
        "processor_time_ratio": max(row["processor_time_ratio"] for row in rows),
        "quarter_learnt_over_all": max(row["quarter_learnt_over_all"] for row in rows),
        "max_rel_error_fp32": max(row["max_rel_error_fp32"] for row in rows),
        "bytes": bytes_rows,
        "seconds": rows,
    }
    configuration = {"bytes": "fake tensors, bfloat16", "seconds": "CPU, float32", "pairs": pairs}
    finish("head", result, configuration, arguments)


def count_bytes(models: dict[str, dict[str, int]]) -> list[dict]:
    """One row per model; the first is the one the headline number is about."""
    from megatron_paradyse import cpu_platform

    cpu_platform.install()
    from benchmarks.head_bytes import embedding_workspace_bytes, head_workspace_bytes

    rows = []
    for name, shape in models.items():
        workspace = head_workspace_bytes("tiles", **shape, again=False)
        rows.append(
            {
                "model": name,
                **shape,
                "workspace_bytes": workspace,
                "workspace_fraction_of_80gib": workspace / (80 * GIB),
                "megatron_bytes": head_workspace_bytes("megatron", **shape, again=False),
                "embedding_bytes": embedding_workspace_bytes("tiles", **shape),
                "megatron_embedding_bytes": embedding_workspace_bytes("megatron", **shape),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    shape = next(iter(models.values()))
    rows[0]["when_tiles_run_again_bytes"] = head_workspace_bytes("tiles", **shape, again=True)
    return rows


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
