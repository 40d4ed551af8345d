"""2,000 iterations with another random plan for every microbatch against fixed:megatron_ts.

A tiny GPT (2 layers, h = 32) on 4 CPU ranks (TP 4), documents of 2 to 64 tokens, one microbatch an
iteration, a plan drawn from all strategies. Both runs see the same documents. Every tenth iteration
the first rank notes its memory: resident bytes, live tensor bytes, open files, threads, cached
plans. A second pair trains in bfloat16. --save draws the figures of docs/reliability.md too.

    .venv/bin/python benchmarks/long_run.py --json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.common import finish, options
from tests.train.harness import run_forked, with_defaults, write_documents
from tests.train.synthetic_costs import write_costs

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
RANKS = 4
LEAST = 40  # iterations: a look at the memory in each quarter
MODEL = [
    *("--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--seq-length", 64),
    *("--micro-batch-size", 1, "--global-batch-size", 1, "--lr", "1e-3", "--split", "100,0,0"),
    *("--tensor-model-parallel-size", RANKS, "--sequence-parallel", "--paradyse"),
    *(
        "--log-interval",
        50,
    ),
]
# name -> (dtype flags, share of the iterations)
DTYPES = {"float32": ([], 1.0), "bfloat16": (["--bf16"], 0.1)}


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    iterations = LEAST if arguments.quick else 2000
    with tempfile.TemporaryDirectory() as name:
        rows = [compare(Path(name), dtype, iterations) for dtype in DTYPES]
        by_cost = memory_by_cost(Path(name), max(LEAST, iterations // 5))
    result = {
        "iterations": iterations,
        "difference_max": {row["dtype"]: row["difference_max"] for row in rows},
        "growth": {row["dtype"]: row["growth"] for row in rows} | {"by cost": by_cost["growth"]},
        "runs": rows,
        "by_cost": by_cost,
    }
    if arguments.save:
        draw(rows, by_cost)
    configuration = {"ranks": RANKS, "layers": 2, "hidden": 32, "learning_rate": 1e-3}
    finish("long_run", result, configuration, arguments)


def compare(folder: Path, dtype: str, iterations: int) -> dict:
    """Both policies, one after the other."""
    flags, share = DTYPES[dtype]
    count = max(LEAST, int(iterations * share))
    fixed = train(folder / f"{dtype}-fixed", "fixed:megatron_ts", count, flags)
    chosen = train(folder / f"{dtype}-random", "random:7", count, flags)
    ours, theirs = (np.array(run["losses"]) for run in (chosen, fixed))
    relative = np.abs(ours / theirs - 1)
    quarters = [float(part.max()) for part in np.array_split(relative, 4)]
    return {
        "dtype": dtype,
        "iterations": count,
        "difference_max": float(relative.max()),
        "difference_max_by_quarter": quarters,
        "mean_difference": float((ours - theirs).mean()),
        "growth": growth(chosen["memory"]),
        "losses": ours.tolist(),
        "losses_megatron_ts": theirs.tolist(),
        "memory": chosen["memory"],
        "memory_megatron_ts": fixed["memory"],
    }


def memory_by_cost(folder: Path, iterations: int) -> dict:
    """Planning by cost under a budget: its cache of plans is bounded."""
    costs = write_costs(folder / "costs.json")
    more = ["--paradyse-cost-model", costs, "--paradyse-accept-costs"]
    run = train(folder / "by-cost", "optimal", iterations, more)
    return {"iterations": iterations, "memory": run["memory"], "growth": growth(run["memory"])}


def train(folder: Path, policy: str, iterations: int, more: list) -> dict:
    folder.mkdir(parents=True)
    lengths = np.random.default_rng(3).integers(2, 65, size=400).tolist()
    write_documents(folder / "corpus", lengths)
    flags = [*MODEL, "--data-path", folder / "corpus", "--train-iters", iterations, *more]
    argv = with_defaults([*flags, "--paradyse-policy", policy])
    code, stdout, stderr = run_forked(
        "benchmarks.long_run_rank",
        [str(folder / "record.json"), *argv],
        ranks=RANKS,
        folder=folder,
        timeout_seconds=2400,
    )
    assert code == 0, stdout[-2000:] + stderr[-3000:]
    print(f"{policy} {more[:1]}: {iterations} iterations", file=sys.stderr, flush=True)
    return json.loads((folder / "record.json").read_text())


def growth(memory: list[dict]) -> dict:
    """From the median of the second quarter to that of the last, in the units of each."""
    parts = np.array_split(np.arange(len(memory)), 4)
    return {
        name: float(
            np.median([memory[i][name] for i in parts[3]])
            - np.median([memory[i][name] for i in parts[1]])
        )
        for name in memory[0]
        if name != "iteration"
    }


def draw(rows: list[dict], by_cost: dict) -> None:
    """The losses and their difference, and what each tenth iteration held."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(rows), figsize=(11, 6), sharex="col", layout="constrained")
    for (above, below), row in zip(axes.T, rows, strict=True):
        x = np.arange(1, row["iterations"] + 1)
        above.plot(x, row["losses_megatron_ts"], lw=0.8, label="fixed:megatron_ts")
        above.plot(x, row["losses"], lw=0.8, ls="--", label="random plan per microbatch")
        above.set(title=f"{row['dtype']}, {row['iterations']:,} iterations", ylabel="loss")
        above.legend(loc="upper right", fontsize=8)
        relative = np.abs(np.array(row["losses"]) / np.array(row["losses_megatron_ts"]) - 1)
        below.semilogy(x, np.maximum(relative, 1e-9), ".", ms=2, color="tab:gray")
        below.set(xlabel="iteration", ylabel="relative difference (at least 1e-9)")
    figure.savefig(FIGURES / "long-run-losses.png", dpi=110)
    names = {"resident_mib": "resident MiB", "files": "open files", "threads": "threads"}
    names |= {"tensor_mib": "live tensors, MiB", "plans": "cached plans"}
    figure, axes = plt.subplots(1, len(names), figsize=(13, 2.9), layout="constrained")
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        lines = {"random plans": rows[0]["memory"], "megatron_ts": rows[0]["memory_megatron_ts"]}
        for text, memory in {**lines, "by cost": by_cost["memory"]}.items():
            axis.plot([m["iteration"] for m in memory], [m[name] for m in memory], lw=1, label=text)
        axis.set(title=label, xlabel="iteration")
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axes[0].legend(fontsize=8, loc="lower right")
    figure.savefig(FIGURES / "long-run-memory.png", dpi=110)


if __name__ == "__main__":
    main()
