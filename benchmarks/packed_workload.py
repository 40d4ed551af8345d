"""Many short documents at once: packed ParaDySe against unpacked, and against fixed strategies.

Trains one model on 4 CPU ranks, an iteration per global batch, all of them in turns: ParaDySe with
a microbatch per document, ParaDySe with packed microbatches, and every fixed strategy on the same
packed microbatches. Lengths are drawn from GitHubCode's published distribution, times 1/32. Costs
come from a profile of the same model made just before; what is over the memory budget by measured
bytes does not run. Beside that: how wrong the costs of packed rows are (each left out in turn), the
time to pack and price 1,024 documents, and an estimate against Megatron's hybrid context
parallelism (benchmarks/hybrid_cp.py).

    .venv/bin/python benchmarks/packed_workload.py --json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import hybrid_cp
from benchmarks.common import checked, count, finish, fitted_costs, options, spawn
from benchmarks.dynamic_workload import (
    MODEL,
    PROFILED,
    QUICK_MODEL,
    QUICK_PROFILED,
    QUICK_RANKS,
    RANKS,
    SCALE,
    flags_of_model,
    profile_and_fit,
)
from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.costs.row_accuracy import measure_row_accuracy, row_lines, summarize_rows
from megatron_paradyse.data.distributions import draw_lengths
from megatron_paradyse.strategies import parse_strategy_name
from megatron_paradyse.units import parse_bytes

BUDGET = "250MB"  # of a rank


def strategies(text: str) -> None:
    for name in text.split(","):
        parse_strategy_name(name)


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--documents", type=count, default=64, help="of a global batch")
    parser.add_argument("--global-batches", type=count, default=3)
    parser.add_argument("--rounds", type=count, default=3, help="times each runs a global batch")
    told = "a fitted cost file of this model and ranks, no profile"
    parser.add_argument("--costs", type=fitted_costs, help=told)
    parser.add_argument(
        "--fixed",
        type=checked(strategies),
        help="strategies to compare with (default: all with costs)",
    )
    parser.add_argument(
        "--budget", type=checked(parse_bytes), default=BUDGET, help="memory of a rank"
    )
    parser.add_argument("--no-estimate", action="store_true", help="leave the peer's estimate out")
    arguments = parser.parse_args()
    quick = arguments.quick
    task = {
        "lengths": [
            draw_lengths("githubcode", 16 if quick else arguments.documents, SCALE, seed).tolist()
            for seed in range(1 if quick else arguments.global_batches)
        ],
        "rounds": 1 if quick else arguments.rounds,
        "budget": arguments.budget,
        "fixed": arguments.fixed.split(",") if arguments.fixed else None,
        "solved": [
            draw_lengths("githubcode", 128 if quick else 1024, SCALE, 100 + seed).tolist()
            for seed in range(1 if quick else 3)
        ],
    }
    flags, ranks = flags_of_model(quick), QUICK_RANKS if quick else RANKS
    with tempfile.TemporaryDirectory() as folder:
        costs = arguments.costs or profile_and_fit(
            Path(folder), flags, PROFILED, quick, packed=True
        )
        errors = measure_row_accuracy(read_cost_file(costs).table)
        print("\n".join(row_lines(errors)), file=sys.stderr)
        output = Path(folder) / "result.json"
        os.environ["PACKED_WORKLOAD"] = json.dumps({**task, "costs": costs, "output": str(output)})
        spawn("benchmarks.packed_workload_rank", flags, ranks=ranks, timeout_seconds=3600)
        result = {**json.loads(output.read_text()), "row_accuracy": summarize_rows(errors)}
    if not (arguments.no_estimate or quick):  # which takes a minute of its own: bench hybrid_cp
        result |= hybrid_cp.estimate()
    configuration = {
        "ranks": ranks,
        "distribution": "githubcode",
        "scale": SCALE,
        "profiled": "given" if arguments.costs else QUICK_PROFILED if quick else PROFILED,
        **{key: task[key] for key in ("lengths", "rounds", "budget")},
        **(QUICK_MODEL if quick else MODEL),
    }
    finish("packed_workload", result, configuration, arguments)


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
