"""Documents of very different lengths under a memory budget: each fixed strategy, and ParaDySe.

Trains one model on 4 CPU ranks, an iteration per document, every policy on every document in turns.
Lengths are drawn from GitHubCode's published distribution, times 1/32, in the order drawn. The
budget is the measured peak of the fastest strategy at 0.425 of the longest document. What does not
fit by measured bytes does not run. Costs come from a profile of the same model made just before, at
lengths that know nothing of the documents. A tail follows: documents longer than the fastest
strategy can run.

    .venv/bin/python benchmarks/dynamic_workload.py --json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import count, finish, fitted_costs, options, seed, spawn
from megatron_paradyse.data.distributions import draw_lengths

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
RANKS = 4
# --quick: a rank per core of a small machine, whose processes alone take half of its minute.
QUICK_MODEL = MODEL | {
    "--num-layers": 2,
    "--hidden-size": 128,
    "--seq-length": 2048,
    "--max-position-embeddings": 2048,
}
QUICK_RANKS = 2
QUICK_PROFILED = "128,256,512"
SCALE = 1 / 32
PROFILED = "128,256,512,1K,2K,3K,5K,8K"
TAIL = (1.2, 1.6, 2.2, 2.8)  # of what the fastest strategy can run


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--documents", type=count, default=60)
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--rounds", type=count, default=3, help="times each policy runs a document")
    told = "a fitted cost file of this model and ranks, no profile"
    parser.add_argument("--costs", type=fitted_costs, help=told)
    arguments = parser.parse_args()
    quick = arguments.quick
    lengths = draw_lengths("githubcode", arguments.documents, SCALE, arguments.seed).tolist()
    task = {
        "lengths": [128, 320, 512, 1280] if quick else lengths,
        "rounds": 1 if quick else arguments.rounds,
        "tail": TAIL[1:2] if quick else TAIL,
        "tail_rounds": 1 if quick else 2,
        "share": 0.425,
    }
    flags = flags_of_model(quick)
    with tempfile.TemporaryDirectory() as folder:
        costs = arguments.costs or profile_and_fit(Path(folder), flags, PROFILED, quick)
        output = Path(folder) / "result.json"
        os.environ["DYNAMIC_WORKLOAD"] = json.dumps({**task, "costs": costs, "output": str(output)})
        ranks = QUICK_RANKS if quick else RANKS
        spawn("benchmarks.dynamic_workload_rank", flags, ranks=ranks, timeout_seconds=3600)
        result = json.loads(output.read_text())
    configuration = {
        "ranks": ranks,
        "distribution": "githubcode",
        "scale": SCALE,
        "documents": arguments.documents,
        "seed": arguments.seed,
        "profiled": "given" if arguments.costs else QUICK_PROFILED if quick else PROFILED,
        **task,
        **(QUICK_MODEL if quick else MODEL),
    }
    finish("dynamic_workload", result, configuration, arguments)


def flags_of_model(quick: bool) -> list[str]:
    return [str(text) for pair in (QUICK_MODEL if quick else MODEL).items() for text in pair]


def profile_and_fit(
    folder: Path,
    flags: list[str],
    lengths: str,
    quick: bool,
    *,
    ranks: int = RANKS,
    packed: bool = False,
) -> str:
    """A fitted cost file of the model on this machine, by the commands that users run.

    quick: whatever the lengths and ranks, few of both and of the strategies.
    """
    if quick:
        lengths, ranks = QUICK_PROFILED, QUICK_RANKS
    raw, fitted = str(folder / "raw.json"), str(folder / "costs.json")
    command = [sys.executable, "-m", "megatron_paradyse"]
    profile = [*command, "profile", "--nproc", str(ranks), "--output", raw, "--lengths", lengths]
    profile += ["--packed"] if packed else []
    if quick:
        profile += ["--quick", "--strategies", "megatron_ts,ulysses_z,metp,metp+recompute"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*profile, *flags], check=True, timeout=1800, env=environment, stdout=sys.stderr)
    subprocess.run([*command, "fit", raw, "-o", fitted], check=True, timeout=300, stdout=sys.stderr)
    return fitted


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
