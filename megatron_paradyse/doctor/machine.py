"""The machine that ranks would run on: GPUs, memory, disk, a checkout."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from megatron_paradyse.doctor import LACK, OK, Check
from megatron_paradyse.doctor.tool import output_of
from megatron_paradyse.machine import cpu_name, free_bytes, system_memory_bytes
from megatron_paradyse.train.megatron_version import SUPPORTED, TAG

LITTLE_DISK = 5 << 30
LITTLE_MEMORY = 4 << 30


def gpus(found: list[dict[str, Any]], torch: dict[str, Any]) -> list[Check]:
    if found:
        return [
            Check(f"GPU {i}", OK, f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB")
            for i, gpu in enumerate(found)
        ]
    seen = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if seen:
        names = "; ".join(seen.splitlines()[:8])
        cost = "ranks run on the CPU with gloo: right, and slow"
        build = torch.get("cuda") or "your CUDA"
        return [
            Check(
                "GPUs",
                LACK,
                f"nvidia-smi names {names}, torch sees none",
                cost,
                f"install a driver that knows CUDA {build}",
            )
        ]
    cost = "ranks run on the CPU with gloo: right, and slow"
    return [Check("GPUs", LACK, "none", cost, "run on a machine with NVIDIA GPUs")]


def resources() -> list[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory, disk = system_memory_bytes(), shutil.disk_usage(".")
    checks = [Check("cores", OK, f"{cores}, {cpu_name()}")]
    free = free_bytes()
    found = f"{memory / 2**30:.1f} GiB"
    if free is not None:
        found += f", of which programs here may take {free / 2**30:.1f}"
    if (memory if free is None else free) < LITTLE_MEMORY:
        cost, remedy = "Megatron alone takes about 1 GiB a rank", "start fewer ranks"
        checks.append(Check("memory", LACK, found, cost, remedy))
    else:
        checks.append(Check("memory", OK, found))
    found = f"{disk.free / 2**30:.1f} GiB free in {os.getcwd()}"
    if disk.free < LITTLE_DISK:
        cost = "checkpoints of a large model may not fit"
        return [*checks, Check("disk", LACK, found, cost, "give --save on a larger disk")]
    return [*checks, Check("disk", OK, found)]


def checkout() -> list[Check]:
    """The Megatron-LM checkout that MEGATRON_LM_PATH names, if it is set."""
    path = os.environ.get("MEGATRON_LM_PATH")
    if not path:
        return []
    name, remedy = "MEGATRON_LM_PATH", f"git -C $MEGATRON_LM_PATH checkout {TAG}"
    cost = "its pretrain_gpt.py cannot be used; megatron_paradyse.pretrain_gpt can"
    if not Path(path, "pretrain_gpt.py").is_file():
        remedy = "export MEGATRON_LM_PATH=/path/to/Megatron-LM"
        return [Check(name, LACK, f"{path} holds no pretrain_gpt.py", cost, remedy)]
    try:
        text = Path(path, "megatron/core/package_info.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    version = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.M)) or "unknown"
    if not version.startswith(f"{SUPPORTED}."):
        return [Check(name, LACK, f"{path}, version {version}", cost, remedy)]
    return [Check(name, OK, f"{path}, version {version}")]
