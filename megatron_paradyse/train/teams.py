"""The replicas that share wide rows, --paradyse-spread of them: their ranks as one group."""

from __future__ import annotations

import statistics
from datetime import timedelta

import torch
from megatron.core import mpu
from megatron.training import get_args
from torch.distributed import ProcessGroup

from megatron_paradyse.moments import slowest_seconds
from megatron_paradyse.strategies import transport
from megatron_paradyse.strategies.contract import Wide
from megatron_paradyse.strategies.transport import Works
from megatron_paradyse.train.batch import device_of_rank

MESSAGE_BYTES, TIMES = 1 << 26, 5

_wide: Wide | None = None


def make_groups(spread: int) -> None:
    """Once Megatron's groups exist; all ranks must call it. Of one replica nothing is made.

    Replicas of neighbouring data-parallel ranks share: each pipeline stage has its own groups.
    """
    global _wide
    if spread == 1 or _wide is not None:
        return
    place = (
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_data_parallel_rank(),
        mpu.get_tensor_model_parallel_rank(),
        torch.distributed.get_rank(),
    )
    own = torch.tensor(place, device=torch.cuda.current_device())
    places = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(places, own)
    teams: dict[tuple[int, ...], list[int]] = {}
    peers: dict[tuple[int, ...], list[int]] = {}
    for stage, replica, tensor, rank in sorted(tuple(of.tolist()) for of in places):
        teams.setdefault((stage, replica // spread), []).append(rank)
        peers.setdefault((stage, replica // spread, tensor), []).append(rank)
    _wide = Wide(_own_group(teams), _own_group(peers))


def _own_group(groups: dict[tuple[int, ...], list[int]]) -> ProcessGroup:
    """Makes them all, on every rank; this rank's."""
    limit = timedelta(minutes=get_args().distributed_timeout_minutes)
    made = [torch.distributed.new_group(ranks, timeout=limit) for ranks in groups.values()]
    (own,) = (group for group in made if isinstance(group, ProcessGroup))
    # NCCL makes a communicator at its first use, which must not be an exchange of a few ranks.
    torch.distributed.all_reduce(torch.zeros(1, device=torch.cuda.current_device()), group=own)
    return own


def wide() -> Wide:
    """The groups of the replicas that share this rank's wide rows."""
    assert _wide is not None, "the model is built before the data are read"
    return _wide


def bytes_per_second() -> float:
    """What a rank sends to another replica's while all do, the least of any; all must call it."""
    group = wide().ranks
    w, rank, device = group.size(), group.rank(), device_of_rank()
    x = torch.zeros(
        MESSAGE_BYTES if device.type == "cuda" else MESSAGE_BYTES >> 4,
        dtype=torch.uint8,
        device=device,
    )
    into = torch.empty_like(x)
    away = {"to": (rank + w // 2) % w, "source": (rank - w // 2) % w}

    def begin() -> Works:
        return transport.exchange(into, x, group, **away)

    seconds = [slowest_seconds(begin, None, device.type) for _ in range(1 + TIMES)]
    return x.nbytes / statistics.median(seconds[1:])  # the first makes connections
