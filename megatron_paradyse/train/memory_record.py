"""What ran out of memory, kept where the next start finds it: beside the checkpoints."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from megatron.core import mpu
from megatron.training import get_args

from megatron_paradyse.train.describe import hardware

NAME = "paradyse-out-of-memory.jsonl"


def keep_beside_checkpoints(record: dict[str, Any]) -> bool:
    """Append a record to a file in the folder of --save; whether it is there now. Any rank may."""
    folder = get_args().save
    if folder is None or "://" in folder:
        return False
    line = (json.dumps({**record, "grid": grid()}) + "\n").encode()
    try:
        os.makedirs(folder, exist_ok=True)
        with open(Path(folder, NAME), "ab", buffering=0) as file:
            return file.write(line) == len(line)  # at once: lines of two ranks do not mix
    except OSError:
        return False


def files_to_read(args: argparse.Namespace, trace: Path | None) -> list[Path]:
    """Those of earlier starts. trace: this grid's."""
    beside = [Path(folder, NAME) for folder in dict.fromkeys([args.save, args.load]) if folder]
    return [path for path in [trace, *beside] if path is not None and path.is_file()]


def grid() -> list[Any]:
    """For what a record holds: the device, and over how many of them a layer and the layers go."""
    tensor = mpu.get_tensor_model_parallel_world_size()
    return [hardware().name, tensor, mpu.get_pipeline_model_parallel_world_size()]
