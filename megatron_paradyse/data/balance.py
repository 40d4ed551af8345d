"""Deals a global batch's samples to data-parallel replicas so that their times are even."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

Seconds = Callable[[int, int], float]  # of b, s: predicted for a microbatch


def deal(
    lengths: Sequence[int], *, micro_batch_size: int, num_replicas: int, seconds: Seconds
) -> list[list[list[int]]]:
    """Per replica its microbatches, each a list of indices into lengths.

    Every replica gets the same number of microbatches. Samples of like lengths share a microbatch;
    the longest-running microbatch goes first, to the replica with the least to do so far that has
    room (longest processing time first). Within a replica they stay in the order of the batch.
    Deterministic: depends on the arguments alone.
    """
    per_replica, rest = divmod(len(lengths), micro_batch_size * num_replicas)
    assert rest == 0, "Megatron's global batch is a multiple of replicas times microbatch size"
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    groups = [
        sorted(order[start : start + micro_batch_size])
        for start in range(0, len(lengths), micro_batch_size)
    ]
    costs = [seconds(micro_batch_size, max(lengths[i] for i in group)) for group in groups]
    dealt: list[list[list[int]]] = [[] for _ in range(num_replicas)]
    load = [(0.0, replica) for replica in range(num_replicas)]
    for number in sorted(range(len(groups)), key=lambda i: (-costs[i], groups[i])):
        spent, replica = heapq.heappop(load)
        dealt[replica].append(groups[number])
        if len(dealt[replica]) < per_replica:
            heapq.heappush(load, (spent + costs[number], replica))
    return [sorted(microbatches) for microbatches in dealt]
