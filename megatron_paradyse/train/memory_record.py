"""What ran out of memory, kept where the next start finds it: beside the checkpoints."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args

from megatron_paradyse.settings import Settings
from megatron_paradyse.train.cost_cache import cache_folder
from megatron_paradyse.train.describe import hardware
from megatron_paradyse.units import parse_bytes
from megatron_paradyse.whole_file import append_whole

NAME = "paradyse-out-of-memory.jsonl"
SAME_MEMORY = 1.01  # drivers keep a little back


@dataclass(frozen=True)
class Start:
    """What decides whether a record of an earlier start holds for this one.

    costs: by which peaks are predicted, see name_of_costs; memory_bytes: see memory_bytes.
    """

    grid: list[Any]
    costs: str
    memory_bytes: int | None

    def has_like(self, record: dict[str, Any], grid: list[Any]) -> bool:
        """Whether a record, of a start on this grid if it names none, would come again here.

        Not where its peak is of other costs, nor where there is more memory now. What a record of
        an earlier version does not tell is taken to be the same.
        """
        if record.get("grid", grid) != self.grid or record.get("costs", self.costs) != self.costs:
            return False
        had = record.get("memory_bytes")
        return had is None or (self.memory_bytes or float("inf")) <= had * SAME_MEMORY


def memory_bytes(settings: Settings) -> int | None:
    """What can run out: the device's memory, or the budget that is enforced on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    return None if settings.memory_budget is None else parse_bytes(settings.memory_budget)


def name_of_costs(path: str, fingerprint: str) -> str:
    """What tells costs apart: of those that a start measured the file's name in the cache.

    Where the cache is lost they are measured again at each start. Their seconds are others then,
    and so is the fingerprint; their bytes, and so the peaks that they predict, stay.
    """
    return Path(path).stem if Path(path).parent == cache_folder() else fingerprint


def circumstances(
    settings: Settings, costs: str | None, *, shared_budget_bytes: int | None = None
) -> dict[str, Any]:
    """Of a record: the margin of its plan, and what Start compares.

    costs: see name_of_costs; None of a policy without. shared_budget_bytes: that of this start,
    where experts lie over several replicas, so that what failed may have been another's tokens.
    """
    margin, memory = settings.memory_margin, memory_bytes(settings)
    found = {"memory_margin": margin, "costs": costs, "memory_bytes": memory}
    if shared_budget_bytes is not None:
        found["shared_budget_bytes"] = shared_budget_bytes
    return found


def keep_beside_checkpoints(record: dict[str, Any]) -> bool:
    """Append a record to a file in the folder of --save; whether it is there now. Any rank may."""
    folder = get_args().save
    if folder is None or "://" in folder:
        return False
    line = (json.dumps({**record, "grid": grid()}) + "\n").encode()
    try:
        os.makedirs(folder, exist_ok=True)
        append_whole(Path(folder, NAME), line)
    except OSError:
        return False
    return True


def files_to_read(args: argparse.Namespace, trace: Path | None) -> list[Path]:
    """Those of earlier starts. trace: this grid's."""
    beside = [Path(folder, NAME) for folder in dict.fromkeys([args.save, args.load]) if folder]
    return [path for path in [trace, *beside] if path is not None and path.is_file()]


def grid() -> list[Any]:
    """For what a record holds: the device, and over how many of them a layer and the layers go."""
    tensor = mpu.get_tensor_model_parallel_world_size()
    return [hardware().name, tensor, mpu.get_pipeline_model_parallel_world_size()]
