"""How fast a rank's tensors go to host memory and back, as +offload moves them."""

from __future__ import annotations

import statistics
import time

import torch

from megatron_paradyse.profiler.model import largest_over_ranks
from megatron_paradyse.strategies.host import copy_to_host

COPIED_BYTES = 32 << 20
REPETITIONS = 9


def host_bytes_per_second() -> float:
    """The mean of both ways, of the slowest rank while all copy at once.

    All ranks must call it.
    """
    tensor = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=torch.cuda.current_device())
    seconds = []
    for _ in range(REPETITIONS):
        torch.distributed.barrier()
        start = time.perf_counter()
        copy = copy_to_host(tensor)
        copy.finish()
        copy.back()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * COPIED_BYTES / largest_over_ranks([statistics.median(seconds)])[0]
