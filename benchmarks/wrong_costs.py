"""Training by a cost file in which the slowest strategy looks fastest: what corrections mend.

Profiles a model on 2 CPU ranks and fits its costs, and makes a copy in which the seconds of the
strategy that is slowest at the middle length are scaled to nine tenths of the fastest one's. Trains
on documents of 128 to 512 tokens by the right costs, by the wrong ones, and by the wrong ones
with corrections. Ratios are of the layers' seconds over those with the right costs, of all
iterations and of the last half.

    .venv/bin/python benchmarks/wrong_costs.py --json
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.common import count, finish, options
from benchmarks.dynamic_workload import profile_and_fit
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.layers import ATTENTION, MLP
from megatron_paradyse.strategies import OFFLOAD, RECOMPUTE
from tests.train.harness import train, write_documents
from tests.train.synthetic_costs import with_seconds_scaled

RANKS = 2
MODEL = ["--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "8"]
MODEL += ["--seq-length", "512", "--max-position-embeddings", "512"]
MODEL += ["--attention-dropout", "0", "--hidden-dropout", "0"]
STRATEGIES = "megatron_ts,ulysses_z,metp"
LENGTHS = "128,192,256,384,512"
MIDDLE = 256
SCALED_TO = 0.9


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=count, default=600)
    parser.add_argument("--rounds", type=count, default=3)
    arguments = parser.parse_args()
    iterations, rounds = arguments.iterations, arguments.rounds
    if arguments.quick:
        iterations, rounds = 260, 1  # trials need 200 iterations that are left
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        right = profile_and_fit(
            folder, [*MODEL, "--vocab-size", "257"], LENGTHS, arguments.quick, ranks=RANKS
        )
        wrong, victim, fastest = misprice(right, folder / "wrong.json")
        lengths = np.random.default_rng(5).integers(128, 513, size=2 * iterations).tolist()
        write_documents(folder / "corpus", lengths)
        sides = {"right": (right, False), "wrong": (wrong, False), "corrected": (wrong, True)}
        found: dict[str, list[np.ndarray]] = {side: [] for side in sides}
        for i in range(rounds):
            for side in list(sides)[:: -1 if i % 2 else 1]:
                found[side].append(run(folder, *sides[side], iterations, f"{side}{i}"))
    of_rounds = {side: np.stack(seconds) for side, seconds in found.items()}
    ratios = {
        f"{side}_{part}": float(
            np.median(of_rounds[side][:, start:].sum(1) / of_rounds["right"][:, start:].sum(1))
        )
        for side in ("wrong", "corrected")
        for part, start in (("all", 0), ("last_half", iterations // 2))
    }
    result = {"fastest": fastest, "priced_too_low": victim, "ratios": ratios}
    configuration = {"ranks": RANKS, "iterations": iterations, "rounds": rounds, "model": MODEL}
    finish("wrong_costs", result, {**configuration, "strategies": STRATEGIES}, arguments)


def misprice(path: str, output: Path) -> tuple[str, str, str]:
    """The wrong file, the strategy whose seconds it scales, and the one that is fastest."""
    file = read_cost_file(path)
    model, table = file.require_model(), file.table
    seconds = {
        name: sum(model.operation(name, half, MIDDLE).time_seconds for half in (ATTENTION, MLP))
        for name in model.strategies(ATTENTION)
        if name in STRATEGIES.split(",")
    }
    fastest, victim = min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)
    scale = SCALED_TO * seconds[fastest] / seconds[victim]
    wrong = with_seconds_scaled(table, (victim, victim + RECOMPUTE, victim + OFFLOAD), scale)
    write_cost_file(output, wrong, fit_table(wrong))
    return str(output), victim, fastest


def run(folder: Path, costs: str, correction: bool, iterations: int, name: str) -> np.ndarray:
    """The layers' seconds of each iteration."""
    trace = folder / f"{name}.jsonl"
    flags = ["--data-path", folder / "corpus", "--split", "100,0,0", "--paradyse", *MODEL]
    flags += ["--tensor-model-parallel-size", RANKS, "--sequence-parallel"]
    flags += ["--micro-batch-size", 1, "--global-batch-size", 1, "--lr", "1e-4"]
    flags += ["--train-iters", iterations, "--paradyse-policy", "optimal"]
    flags += ["--paradyse-granularity", "layer"]
    flags += ["--paradyse-cost-model", costs, "--paradyse-strategies", STRATEGIES]
    flags += ["--paradyse-accept-costs", "--paradyse-trace", trace]
    flags += [] if correction else ["--paradyse-no-correction"]
    train(folder / name, *flags, ranks=RANKS, timeout_seconds=1800)
    seconds = np.zeros(iterations)
    plans: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for line in trace.open("rb"):
        record = json.loads(line)
        if record["kind"] == "microbatch":
            seconds[record["iteration"] - 1] += record["seconds"]
            plans[record["iteration"] > iterations // 2][record["plan"]] += 1
    told = [dict(half.most_common(2)) for half in plans]
    print(f"{name}: plans of either half {told}", file=sys.stderr, flush=True)
    return seconds


if __name__ == "__main__":
    main()
