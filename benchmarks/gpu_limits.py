"""The paper's models on one GPU in the place of a rank of 8: limits measured and simulated.

Costs simulated for this GPU predict the longest sequence of each strategy and of ParaDySe; then
whole iterations at lengths about each limit run on it (`max-length --measure --stand-in`), in full
width and depth (GPT and LLaMA 8 layers, BERT 24), the allocator kept to --memory. What is predicted
to take longer than --most-seconds is left out.

Without one: a small model on the CPU, whose bytes are counted. That checks that it runs and no
more: the CPU's kernels are not fused and hold more than those of the GPU that the costs are of.

    .venv/bin/python benchmarks/gpu_limits.py --json --folder limits
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, made_folder, names_of, options
from benchmarks.dynamic_workload import MODEL
from benchmarks.max_length_real import SHAPES

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "megatron_paradyse"]
DEVICES = {
    "A100": "a100-80g",
    "A800": "a800-80g",
    "H100": "h100-80g",
    "H200": "h200",
    "H800": "h800",
}
LENGTHS = {
    "gpt": "16K,64K,192K,384K,640K,1M,1536K,2M",
    "llama": "16K,64K,256K,512K,1M,1536K,2560K,4M",
    "bert": "64K,256K,1M,2M,4M,9M,18M,32M",
}
RANKS, MEMORY = 8, "76GiB"  # 80 less 5%
TOY_RANKS, TOY_MEMORY, TOY_LENGTHS = 4, "80MiB", "256,1K,4K,8K"
OURS = "ParaDySe"
RIVALS = ("megatron_ts", "ulysses_z")


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=made_folder, help="keep the costs and trials here, and go on from them"
    )
    parser.add_argument(
        "--models", type=names_of(LENGTHS), default="gpt,llama,bert", help="comma-separated"
    )
    parser.add_argument("--memory", help=f"of a rank; default {MEMORY}")
    parser.add_argument("--strategies", help="comma-separated; default: all")
    parser.add_argument("--measure-only", help="comma-separated, beside ParaDySe; default: all")
    parser.add_argument("--resolution", type=float, default=0.02, help="of a limit; default 0.02")
    parser.add_argument("--most-seconds", type=float, default=60.0, help="of a trial; default 60")
    arguments = parser.parse_args()
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    models = arguments.models[: 1 if arguments.quick else None]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary).resolve()  # commands run in the checkout
        found = {name: _model(folder, name, gpu, arguments) for name in models}
    memory = arguments.memory or (MEMORY if gpu else TOY_MEMORY)
    configuration = {"ranks": RANKS if gpu else TOY_RANKS, "memory": memory}
    configuration |= {"most_seconds": arguments.most_seconds}
    finish("gpu_limits", {"models": found}, configuration, arguments)


def _model(folder: Path, name: str, gpu: str | None, arguments) -> dict:
    costs, raw = folder / f"{name}.json", folder / f"{name}-raw.json"
    device = next((device for part, device in DEVICES.items() if part in (gpu or "A100")), None)
    if device is None:
        raise SystemExit(f"error: no description of {gpu}: use one of {', '.join(DEVICES)}")
    flags = ["--model", name]
    ranks, memory, lengths, dtype = RANKS, MEMORY, LENGTHS[name], "bfloat16"
    if gpu is None:
        flags = [str(text) for pair in MODEL.items() for text in pair] + SHAPES[name]
        ranks, memory, lengths, dtype = TOY_RANKS, TOY_MEMORY, TOY_LENGTHS, "float32"
    if not costs.is_file():
        simulate = ["simulate", "--gpu", device, "--ranks", str(ranks), "--lengths", lengths]
        _run([*simulate, "--dtype", dtype, "-o", str(raw), *flags])
        _run(["fit", str(raw), "-o", str(costs)])
    limits = ["max-length", str(costs), "--json"]
    limits += ["--memory-budget", arguments.memory or memory]
    if arguments.strategies or arguments.quick:
        limits += ["--strategies", arguments.strategies or "megatron_ts,ulysses_z"]
    if arguments.quick:
        limits += ["--no-offload"]
    names = [limit["strategy"] for limit in json.loads(_run(limits))["single"]]
    if arguments.measure_only:
        names = [name for name in arguments.measure_only.split(",") if name != OURS]
    found = {}
    # A strategy alone is tried at its limit, to the byte; plans fill the memory up to their margin.
    for who, only, margin in (("single", names, ["--memory-margin", "0"]), ("ours", [OURS], [])):
        measure = ["--measure", str(folder / f"{name}-{who}-trials.json"), "--stand-in"]
        measure += ["--measure-only", ",".join(only), "--most-seconds", str(arguments.most_seconds)]
        measure += ["--resolution", "0.1" if arguments.quick else str(arguments.resolution)]
        found[who] = json.loads(_run([*limits, *measure, *margin, *flags]))["measured"]
    return _compared(found["single"], found["ours"])


def _compared(single: dict, ours: dict) -> dict:
    """The limits, how far predictions were off, and ParaDySe's over those of the paper's rivals."""
    limits = [*ours["limits"], *single["limits"]]
    tokens = {limit["strategy"]: limit["tokens"] for limit in limits}
    closed = [limit for limit in limits if limit["above"] and limit["tokens"]]
    return {
        "about": single["about"],
        "margin_of_paradyse_ppm": ours["about"]["margin_ppm"],
        "limits": limits,
        "largest_error": max((abs(limit["error"]) for limit in closed), default=None),
        "left_open": [limit["strategy"] for limit in limits if not limit["above"]],
        "ratio_to": {name: tokens[OURS] / tokens[name] for name in RIVALS if tokens.get(name)},
    }


def _run(arguments: list[str]) -> str:
    run = subprocess.run(
        [*COMMAND, *arguments], timeout=7200, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if run.returncode:  # it has said why
        raise SystemExit(f"error: `{arguments[0]}` ended with {run.returncode}")
    return run.stdout


if __name__ == "__main__":
    main()
