"""Rows of all ranks, as a gather or an all_to_all brings them, <-> rows in the order of positions.

A rank that holds the whole sequence computes each document in one piece, wherever its tokens came
from. A microbatch without shards, or whose shards are contiguous chunks, is in order already. Of a
wide one these are the rows of one group.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from megatron_paradyse.strategies.contract import Microbatch, Shards
from megatron_paradyse.strategies.host import to_device


def to_positions(x: Tensor, microbatch: Microbatch) -> Tensor:
    """x [s, ...] in the order of ranks and their rows -> in the order of positions."""
    if in_order(microbatch):
        return x
    order = _order(microbatch, x)
    return _Permute.apply(x, order.rows, order.places, order)


def to_rows(x: Tensor, microbatch: Microbatch) -> Tensor:
    """The inverse of to_positions."""
    if in_order(microbatch):
        return x
    order = _order(microbatch, x)
    return _Permute.apply(x, order.places, order.rows, order)


def in_order(microbatch: Microbatch) -> bool:
    """Whether the rows of the ranks, one rank after the other, are in the order of positions."""
    shards = microbatch.shards_of_group()
    if shards is None:
        return True
    starts = [start for shard in shards for start, _ in shard]
    return all(first < second for first, second in itertools.pairwise(starts))


@dataclass(frozen=True, eq=False)
class _Order:
    """For each position in order its row, and for each row its place."""

    rows: Tensor
    places: Tensor


# Fake ones are there as long as a graph needs them: q, k, v and the output share one, as real ones
# do, and no other simulation finds it.
_fake_orders: WeakValueDictionary[tuple[Shards, torch.device], _Order] = WeakValueDictionary()


def _order(microbatch: Microbatch, x: Tensor) -> _Order:
    """On the device of x."""
    shards = microbatch.shards_of_group()
    assert shards is not None
    if type(x) is Tensor:
        return _order_on(shards, x.device)
    key = shards, x.device
    found = _fake_orders.get(key)
    if found is None:
        found = _fake_orders[key] = _order_on.__wrapped__(*key)
    return found


@lru_cache(maxsize=4)  # one copy to the device for all layers
def _order_on(shards: Shards, device: torch.device) -> _Order:
    ranges = [np.arange(start, stop) for shard in shards for start, stop in shard]
    rows = np.argsort(np.concatenate(ranges))
    places = np.empty_like(rows)
    places[rows] = np.arange(len(rows))
    return _Order(to_device(rows, device), to_device(places, device))


class _Permute(Function):
    @staticmethod
    def forward(ctx, x, index, inverse, order):
        ctx.save_for_backward(inverse)
        ctx.order = order
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None, None
