"""Attention with sliding windows on 8 and 16 H100, simulated, and plans of layers in turns.

A layer of Llama 3 8B's sizes without dropout, under windows of 1,024 and 4,096 keys: its
attention as it is, and with rings of all keys and swapped halves, as within windows that are not
narrow. Then 12 such layers on 16 ranks of which all but every sixth have the smaller window: the
plan that training would choose beside the best single strategy. No GPU runs; it takes about ten
minutes on two busy cores.

    .venv/bin/python benchmarks/windows.py --json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, options
from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.costs.table import ATTENTION

ROOT = Path(__file__).resolve().parents[1]
GPU, SEQ_LENGTHS = "h100-80g", "64K,256K"
RANKS, WINDOWS = (8, 16), (1024, 4096)  # keys that a query sees, its own among them
STRATEGIES = "megatron_cz,metp,ulysses_z"
# configs/models/llama3-8b.yaml
LAYER = [
    *("--hidden-size", "4096", "--num-attention-heads", "32", "--group-query-attention"),
    *("--num-query-groups", "8", "--ffn-hidden-size", "14336", "--swiglu", "--disable-bias-linear"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--vocab-size", "128256"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
    "--untie-embeddings-and-output-weights",
]
NUM_LAYERS, FULL_EVERY = 12, 6
PLANNED = "16K,32K,64K,128K"
SINGLE = ("megatron_ts", "ulysses_z", "megatron_cz", "metp")


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"ranks": RANKS[:1], "windows": WINDOWS[:1]} if arguments.quick else {}
        rows = layer_rows(Path(folder), **sizes)
        plans = [] if arguments.quick else layers_in_turns(Path(folder))
    configuration = {"gpu": GPU, "layer": LAYER, "num_layers": NUM_LAYERS}
    finish("windows", {"rows": rows, "plans": plans}, configuration, arguments)


def layer_rows(
    folder: Path, *, ranks: tuple[int, ...] = RANKS, windows: tuple[int, ...] = WINDOWS
) -> list[dict[str, Any]]:
    """Milliseconds of an attention, forward and backward, by strategy; whole: of whole rings."""
    rows: dict[tuple[int, int, int], dict[str, Any]] = {}
    for p, window in ((p, window) for p in ranks for window in windows):
        for key, module in (("ms", "megatron_paradyse"), ("whole_ms", "benchmarks.windows_rank")):
            path = folder / f"{key}-{p}-{window}.json"
            where = ["--lengths", SEQ_LENGTHS, "--strategies", STRATEGIES]
            _simulate(module, path, p, [*where, "--num-layers", "1", *_window(window)])
            for m in read_cost_file(str(path)).table.measurements:
                if m.operation == ATTENTION:
                    new = {"p": p, "window": window, "s": m.seq_length, "ms": {}, "whole_ms": {}}
                    row = rows.setdefault((p, window, m.seq_length), new)
                    row[key][m.strategy] = 1e3 * m.time_seconds
    return list(rows.values())


def layers_in_turns(folder: Path) -> list[dict[str, Any]]:
    """Of each length the plan, and how much longer the best single strategy takes.

    Seconds are those of a microbatch: layers, embedding and head.
    """
    raw, fitted = folder / "raw.json", folder / "costs.json"
    turns = ["--num-layers", str(NUM_LAYERS), "--window-attn-skip-freq", str(FULL_EVERY)]
    turns += _window(WINDOWS[0])
    longest = ["--max-length", "256K", "--strategies", ",".join(SINGLE)]
    _simulate("megatron_paradyse", raw, RANKS[-1], [*longest, *turns])
    _run("megatron_paradyse", ["fit", str(raw), "-o", str(fitted)])
    given = ["plan", str(fitted), "--lengths", PLANNED, "--json"]
    plans = []
    for one in json.loads(_run("megatron_paradyse", given))["lengths"]:
        (single,) = [rival for rival in one["rivals"] if rival["kind"] == "uniform"]
        seconds = one["edge_seconds"] + single["layer_seconds"]
        plans.append(
            {
                "s": one["seq_length"],
                "plan": one["plan"],
                "single": single["name"],
                "single_over_plan": seconds / one["seconds"],
            }
        )
    return plans


def _window(keys: int) -> list[str]:
    """Megatron's flag counts those before the query."""
    return ["--window-size", f"{keys - 1},0"]


def _simulate(module: str, path: Path, p: int, flags: list[str]) -> None:
    _run(module, ["simulate", "--gpu", GPU, "--ranks", str(p), "-o", str(path), *flags, *LAYER])


def _run(module: str, arguments: list[str]) -> str:
    print(f"{module} {' '.join(arguments[:8])} ...", file=sys.stderr)
    command = [sys.executable, "-m", module, *arguments]
    run = subprocess.run(
        command, cwd=ROOT, check=True, timeout=3600, text=True, stdout=subprocess.PIPE
    )
    return run.stdout


if __name__ == "__main__":
    main()
