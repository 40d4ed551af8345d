"""What every benchmark shares: options, the description of the machine, the last line of JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.doctor.tool import output_of
from megatron_paradyse.errors import UserError
from megatron_paradyse.machine import cpu_name
from megatron_paradyse.ports import free_port
from megatron_paradyse.whole_file import write_whole

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "megatron-core", "numpy", "xgboost", "flash-attn", "transformer-engine")


def options(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print the result as the last line")
    how = parser.add_mutually_exclusive_group()  # a saved result is a full one
    how.add_argument("--quick", action="store_true", help="about a minute, on two idle cores")
    how.add_argument("--save", action="store_true", help="write it to benchmarks/results/")
    return parser


def count(text: str) -> int:
    """What an option has: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text[:40]!r}")
    return int(text)


def seed(text: str) -> int:
    """What an option has: 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text[:40]!r}")
    return int(text)


def made_folder(text: str) -> Path:
    """What an option has: a folder that is there, or can be made."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]}: {error.strerror}") from error
    return path


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """What an option has: some of the names, comma-separated."""

    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                told = f"none is named {name[:40]!r}: use some of {', '.join(known)}"
                raise argparse.ArgumentTypeError(told)
        return text.split(",")

    return names


def checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """What an option has: text in which parse finds nothing wrong, which raises UserError."""

    def text_of(text: str) -> str:
        try:
            parse(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return text_of


def fitted_costs(path: str) -> str:
    """What an option has: a cost file with models."""
    return checked(lambda path: read_cost_file(path).require_model())(path)


def finish(name: str, result: dict, configuration: dict, arguments: argparse.Namespace) -> None:
    """Print the result with hardware, versions and date, and save it if asked."""
    document = {
        "benchmark": name,
        **result,
        "configuration": configuration,
        "hardware": hardware(),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "quick": arguments.quick,
    }
    print(json.dumps(document), flush=True)  # first: it took an hour, and a disk may be full
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}-{hardware_tag()}.json"
        write_whole(path, json.dumps(document, indent=1) + "\n")
        print(f"wrote {path}", file=sys.stderr)


def interleaved(
    sides: dict[str, Callable[[], object]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each side in each round, in which they take turns; two rounds before warm up."""
    import torch

    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(-2, rounds):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            sides[name]()
            if device == "cuda":
                torch.cuda.synchronize()
            if i >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def hardware() -> dict:
    import torch

    described = {"cpu": cpu_name(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
        described["num_gpus"] = torch.cuda.device_count()
    return described


def hardware_tag() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"cpu-{os.cpu_count()}-cores"


def versions() -> dict[str, str]:
    """Of what is installed: a machine may lack what a benchmark does not use."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | _gpu_versions()


def _gpu_versions() -> dict[str, str]:
    """What else decides how fast a GPU is, as far as it is known; {} without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    found = {"cuda": torch.version.cuda}
    with contextlib.suppress(AttributeError, RuntimeError):  # a PyTorch without NCCL
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    found["driver"] = output_of("nvidia-smi", *query).partition("\n")[0]
    return {name: text for name, text in found.items() if text}


def spawn(module: str, arguments: list[str], *, ranks: int, timeout_seconds: float) -> None:
    """Run `-m module` on gloo ranks of this machine; raises if one fails or the limit passes."""
    port = free_port()
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", module, *arguments]
        processes.append(subprocess.Popen(command, env=environment, stdout=sys.stderr))
    try:
        for process in processes:
            if process.wait(timeout=timeout_seconds):
                raise RuntimeError(f"{module}: a rank ended with exit code {process.returncode}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
