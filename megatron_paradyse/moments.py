"""Moments between kernels, and seconds between moments: of the stream on a GPU, else the host."""

from __future__ import annotations

import time
from typing import Any

import torch


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
