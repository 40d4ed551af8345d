"""The replicas that share wide rows, --paradyse-spread of them: their ranks as one group."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta

import torch
from megatron.core import mpu
from megatron.training import get_args
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies import transport
from megatron_paradyse.train.batch import device_of_rank

MESSAGE_BYTES, TIMES = 1 << 26, 5

_wide_group: ProcessGroup | None = None


def make_groups(spread: int) -> None:
    """Once Megatron's groups exist; all ranks must call it. Of one replica nothing is made.

    Replicas of neighbouring data-parallel ranks share: each pipeline stage has its own groups.
    """
    global _wide_group
    if spread == 1 or _wide_group is not None:
        return
    world = torch.distributed.get_world_size()
    rank_of = (
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_data_parallel_rank(),
        mpu.get_tensor_model_parallel_rank(),
    )
    device = torch.cuda.current_device()
    own = torch.tensor([*rank_of, torch.distributed.get_rank()], device=device)
    places = [torch.empty_like(own) for _ in range(world)]
    torch.distributed.all_gather(places, own)
    teams: dict[tuple[int, int], list[int]] = {}
    for stage, replica, _, rank in sorted(place.tolist() for place in places):
        teams.setdefault((stage, replica // spread), []).append(rank)
    limit = timedelta(minutes=get_args().distributed_timeout_minutes)
    for ranks in teams.values():
        group = torch.distributed.new_group(ranks, timeout=limit)
        if isinstance(group, ProcessGroup):  # of others there is none
            _wide_group = group
    # NCCL makes a communicator at its first use, which must not be an exchange of a few ranks.
    torch.distributed.all_reduce(torch.zeros(1, device=device), group=_wide_group)


def wide_group() -> ProcessGroup:
    """All ranks of the replicas that share this rank's wide rows: one replica after the other."""
    assert _wide_group is not None, "the model is built before the data are read"
    return _wide_group


def bytes_per_second() -> float:
    """What a rank sends to another replica's while all do, the least of any; all must call it."""
    group = wide_group()
    w, rank, device = group.size(), group.rank(), device_of_rank()
    x = torch.zeros(
        MESSAGE_BYTES if device.type == "cuda" else MESSAGE_BYTES >> 4,
        dtype=torch.uint8,
        device=device,
    )
    into = torch.empty_like(x)
    away = {"to": (rank + w // 2) % w, "source": (rank - w // 2) % w}
    seconds = []
    for _ in range(1 + TIMES):  # the first makes connections
        torch.distributed.barrier()
        start = time.perf_counter()
        for work in transport.exchange(into, x, group, **away):
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor([statistics.median(seconds[1:])], device=device)
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
    return x.nbytes / float(slowest)
