"""Loss curves of training that switches by cost against fixed:megatron_ts, on three grids.

200 iterations of 4 microbatches, documents of 2 to 256 tokens, float32, 4 layers, h = 64, 4 CPU
ranks; costs are invented, so that plans change with the length under a memory budget. Both runs see
the same documents; difference is the largest relative difference of a loss. With --packed the run
by cost packs global batches of 16 documents, and the other one runs them one by one.

    .venv/bin/python benchmarks/loss_curves.py --json
    .venv/bin/python benchmarks/loss_curves.py --packed --json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.common import finish, names_of, options
from tests.train.harness import train, write_documents
from tests.train.synthetic_costs import write_costs

TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
GRIDS = {
    "tp4": ["--tensor-model-parallel-size", 4, "--sequence-parallel"],
    "tp2-pp2": [*TP2, "--pipeline-model-parallel-size", 2],
    "tp2-dp2": TP2,
}


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--packed", action="store_true", help="packed microbatches, by cost")
    parser.add_argument(
        "--grids", type=names_of(GRIDS), default=",".join(GRIDS), help="names, comma-separated"
    )
    arguments = parser.parse_args()
    iterations, packed = 10 if arguments.quick else 200, arguments.packed
    with tempfile.TemporaryDirectory() as name:
        rows = [
            compare(Path(name) / grid, grid, iterations, packed=packed) for grid in arguments.grids
        ]
    for row in rows:
        print(json.dumps({key: value for key, value in row.items() if "losses" not in key}))
    result = {
        "iterations": iterations,
        "difference_max": max(row["difference_max"] for row in rows),
        "grids": rows,
    }
    name = "loss_curves_packed" if packed else "loss_curves"
    finish(name, result, {"ranks": 4, "dtype": "float32"}, arguments)


def compare(folder: Path, grid: str, iterations: int, *, packed: bool) -> dict:
    """Train with megatron_ts and by cost; losses, and how many microbatches changed the plan."""
    folder.mkdir()
    lengths = np.random.default_rng(3).integers(2, 257, size=max(200, 5 * iterations)).tolist()
    write_documents(folder / "corpus", lengths)
    flags = ["--data-path", folder / "corpus", "--split", "100,0,0", "--paradyse", *GRIDS[grid]]
    flags += ["--micro-batch-size", 1, "--global-batch-size", 16 if packed else 4, "--lr", "1e-3"]
    flags += ["--seq-length", 256, "--max-position-embeddings", 256, "--train-iters", iterations]
    fixed = train(folder / "fixed", *flags, ranks=4, timeout_seconds=1800)
    flags += ["--paradyse-policy", "optimal", "--paradyse-cost-model"]
    flags += [write_costs(folder / "costs.json"), "--paradyse-accept-costs"]
    budget = "1GB" if packed else "80MB"  # rows of many documents; plans that change
    flags += ["--paradyse-memory-budget", budget, "--paradyse-no-correction"]
    flags += ["--paradyse-sequences", "packed"] if packed else []
    trace = folder / "trace.jsonl"
    chosen = train(folder / "run", *flags, "--paradyse-trace", trace, ranks=4, timeout_seconds=1800)
    records = [json.loads(line) for path in folder.glob("trace*.jsonl") for line in path.open("rb")]
    microbatches = [record for record in records if record["kind"] == "microbatch"]
    ours, theirs = chosen.values("loss"), fixed.values("loss")
    assert len(ours) == len(theirs) == iterations
    return {
        "grid": grid,
        "difference_max": float(np.abs(ours / theirs - 1).max()),
        "plans": len({record["plan"] for record in microbatches}),
        "microbatches": len(microbatches),
        "changes_of_plan": sum(record["switched"] for record in microbatches),
        "losses": ours.tolist(),
        "losses_megatron_ts": theirs.tolist(),
    }


if __name__ == "__main__":
    main()
