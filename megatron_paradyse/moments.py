"""Moments between kernels and seconds between them, of a GPU's stream or the host; seconds of
communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def moment() -> Any:
    """Now; on a GPU when its stream gets there, so that the host may run ahead as in training."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Of two moments; waits for the second."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def slowest_seconds(begin: Callable[[], list], group: Any, device: str) -> float:
    """Of communication that all ranks of a group begin together, the slowest rank's; None: of all
    ranks there are.
    """
    dist.barrier(group)
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for work in begin():
        work.wait()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor([time.perf_counter() - start], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return float(seconds)
