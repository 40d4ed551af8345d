"""Bytes per token that live outside the layers: Megatron's edges, and the same in tiles.

A small GPT is built and run as training does, on 2 CPU ranks in float32. Every tensor is counted
while it lives, under the function that made it, at two lengths: what differs, over the difference
of the lengths, is bytes per token of the sequence, on one rank.

    .venv/bin/python benchmarks/edges.py --json
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

LENGTHS = (4096, 8192)
RANKS = 2
MODEL = {
    "--num-layers": 1,
    "--hidden-size": 64,
    "--num-attention-heads": 4,
    "--seq-length": max(LENGTHS),
    "--max-position-embeddings": max(LENGTHS),
    "--micro-batch-size": 1,
    "--global-batch-size": 1,
    "--train-iters": 10,
    "--lr": "1e-4",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": 1024,
    "--make-vocab-size-divisible-by": 128,
    "--eval-iters": 0,
    "--eval-interval": 1000,
    "--attention-dropout": 0,
    "--tensor-model-parallel-size": RANKS,
}
UNTIED = "--untie-embeddings-and-output-weights"
POSITIONS = {
    "rope": ["--position-embedding-type", "rope", UNTIED, "--hidden-dropout", "0"],
    "rope, dropout": ["--position-embedding-type", "rope", UNTIED, "--hidden-dropout", "0.1"],
    "learned": ["--position-embedding-type", "learned_absolute", UNTIED, "--hidden-dropout", "0"],
}
WAYS = {"megatron": "off", "tiles": "512"}


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    positions = ["rope"] if arguments.quick else list(POSITIONS)
    ways = {"tiles": WAYS["tiles"]} if arguments.quick else WAYS
    rows = []
    for position in positions:
        for way, tile in ways.items():
            for row in measure([*POSITIONS[position], "--paradyse-head-tile", tile]):
                rows.append({"positions": position, "way": way, **row})
                if row["maker"] == "all":
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finish("edges", {"rows": rows}, {"ranks": RANKS, "lengths": LENGTHS, **MODEL}, arguments)


def measure(flags: list[str]) -> list[dict]:
    """Rows of edge (embedding, head), moment, maker ("all" sums up), bytes_per_token."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "makers.json"
        os.environ["EDGES"] = json.dumps({"lengths": LENGTHS, "output": str(output)})
        given = [str(text) for pair in MODEL.items() for text in pair]
        given += [
            "--sequence-parallel",
            "--paradyse",
            "--paradyse-policy",
            "fixed:megatron_ts",
            *flags,
        ]
        spawn("benchmarks.edges_rank", given, ranks=RANKS, timeout_seconds=300)
        found = json.loads(output.read_text())
    rows = []
    short, long = LENGTHS
    for key in (key for key in found if key.endswith(f" {short}")):
        edge, moment, _ = key.split()
        before, after = found[key], found[f"{edge} {moment} {long}"]
        slopes = {
            maker: (after.get(maker, 0) - before.get(maker, 0)) / (long - short)
            for maker in before | after
        }
        slopes = {"all": sum(slopes.values()), **slopes}
        rows += [
            {"edge": edge, "moment": moment, "maker": maker, "bytes_per_token": slope}
            for maker, slope in slopes.items()
            if slope
        ]
    return rows


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
