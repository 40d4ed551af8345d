"""The one place where strategies hand buffers to torch.distributed, always on an explicit group.

Each function begins one communication and returns its works: until all have been waited for, the
buffers must live, what is sent must not change and what is received must not be read. Buffers are
contiguous; ranks are ranks of the group. Callers name these functions through the module, so that
a test may put others in their place.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Works = list[Any]  # of objects with wait()

_exchanges: Counter[str] = Counter()  # by the name of the group
_counted_messages: Counter[str] = Counter()  # by the group itself: gloo counts each, NCCL may
_without_count = {"fake"}  # backends: of simulated groups, and what else says that it has none


def num_begun(group: ProcessGroup) -> int:
    """How many communications this rank has begun in the group, Megatron's collectives included.

    Ranks that are at the same place have begun as many: what not all take part in does not count.
    """
    name = group.group_name
    return _num_counted(group) - _counted_messages[name] + _exchanges[name]


def _num_counted(group: ProcessGroup) -> int:
    """The group's own count: of its collectives, and of messages as the backend likes."""
    backend = dist.get_backend(group)
    if backend in _without_count:
        return 0
    try:
        return group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except RuntimeError:
        _without_count.add(backend)
        return 0


def all_gather(into: Tensor, x: Tensor, group: ProcessGroup) -> Works:
    return [dist.all_gather_into_tensor(into, x, group=group, async_op=True)]


def reduce_scatter(into: Tensor, x: Tensor, group: ProcessGroup) -> Works:
    return [dist.reduce_scatter_tensor(into, x, group=group, async_op=True)]


def all_to_all(
    into: Tensor,
    x: Tensor,
    group: ProcessGroup,
    *,
    num_received: list[int] | None = None,
    num_sent: list[int] | None = None,
) -> Works:
    """Even blocks of rows, or by rank as many as the lists say."""
    return [dist.all_to_all_single(into, x, num_received, num_sent, group=group, async_op=True)]


def exchange(into: Tensor, x: Tensor, group: ProcessGroup, *, to: int, source: int) -> Works:
    """Send x to rank `to` and receive from rank `source`, as one batch: no order can deadlock.

    What is empty is neither sent nor received: both sides know.
    NCCL makes the group's communicator at its first use, which all ranks must join. A group whose
    first use is an exchange in which some rank has no part (swap_halves with odd p) would hang;
    Megatron uses the tensor-parallel group before any layer runs.
    """
    operations = [
        dist.P2POp(operation, buffer, dist.get_global_rank(group, peer), group)
        for operation, buffer, peer in ((dist.isend, x, to), (dist.irecv, into, source))
        if buffer.numel()
    ]
    if to != source or group.size() == 2:  # a swap, in which the middle rank may have no part
        _exchanges[group.group_name] += 1
    if not operations:
        return []
    before = _num_counted(group)
    works = dist.batch_isend_irecv(operations)
    _counted_messages[group.group_name] += _num_counted(group) - before
    return works


def broadcast(x: Tensor, group: ProcessGroup, *, owner: int) -> Works:
    root = dist.get_global_rank(group, owner)
    return [dist.broadcast(x, root, group=group, async_op=True)]


def reduce(x: Tensor, group: ProcessGroup, *, owner: int) -> Works:
    """Sum into the owner's x, in place; x is spoilt elsewhere."""
    root = dist.get_global_rank(group, owner)
    return [dist.reduce(x, root, group=group, async_op=True)]
