"""A rank of benchmarks/long_run.py: long_run_rank RECORD.json <Megatron flags>."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import threading
from pathlib import Path

from megatron_paradyse.train import plugin

EVERY = 10  # iterations between two looks at the memory


def main() -> None:
    path = sys.argv[1]
    sys.argv = ["pretrain", *sys.argv[2:]]
    plugin.install()
    from megatron.training import training

    original = training.training_log
    losses: list[float] = []
    memory: list[dict] = []

    @functools.wraps(original)
    def training_log(*args, **kwargs):
        losses.append(float(args[0]["lm loss"]))
        if args[3] % EVERY == 0 and os.environ["RANK"] == "0":
            memory.append({"iteration": args[3], **held()})
        return original(*args, **kwargs)

    training.training_log = training_log
    from megatron_paradyse.train.gpt import pretrain

    pretrain()
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps({"losses": losses, "memory": memory}))


def held() -> dict[str, float]:
    """What this rank holds now."""
    import torch

    from megatron_paradyse.planner.cache import CachedPlanner

    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    objects = gc.get_objects()
    tensors = {t.untyped_storage().data_ptr(): t.nbytes for t in objects if type(t) is torch.Tensor}
    plans = sum(len(o._outcomes) for o in objects if isinstance(o, CachedPlanner))
    return {
        "resident_mib": round(int(resident) / 1024, 1),
        "tensor_mib": round(sum(tensors.values()) / 2**20, 3),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "plans": plans,
    }


if __name__ == "__main__":
    main()
