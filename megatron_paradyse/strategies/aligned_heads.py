"""Blocks of whole heads from shards of linear_qkv's rows, and their gradients back.

Megatron shards the rows of qkv evenly. With g % p == 0 a shard is a block of whole heads; else it
may begin and end inside a head. The aligned block of rank r has the rows of its n/p query heads
and of the key/value heads these use, laid out as linear_qkv lays out its own: m slots, each of n'
query heads that share a key head, then their gates if there are any, the key and the value head:

    n' = gcd(n/p, n/g)      m = n / (p n')
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies import transport
from megatron_paradyse.strategies.collectives import Pending, record
from megatron_paradyse.strategies.contract import AttentionShape


def heads_per_slot(shape: AttentionShape, p: int) -> int:
    """Query heads beside each key head of an aligned block; n/g when g % p == 0."""
    return gcd(shape.num_heads // p, shape.heads_per_group)


def num_kv_heads_per_block(shape: AttentionShape, p: int) -> int:
    """Key heads of an aligned block; g/p when g % p == 0."""
    return shape.num_heads // (p * heads_per_slot(shape, p))


def align(shard: Tensor, shape: AttentionShape, group: ProcessGroup) -> Tensor:
    """The rank's shard of qkv (or of its bias), [(n + 2g) d / p, ...] -> its aligned block.

    An all_to_all of the rows that other ranks' blocks need. None when g % p == 0.
    """
    if shape.num_kv_heads % group.size() == 0:
        return shard
    plan = _plan(shape, group.size(), group.rank(), shard.device)
    block = shard.new_empty(len(plan.place), *shard.shape[1:])
    rows = torch.cat(plan.rows_for)
    for part, block_part in plan.column_chunks(shard, block):
        received = _all_to_all_rows(part[rows], plan.num_sent, plan.num_received, group)
        block_part.copy_(received[plan.place])
    return block


def align_gradient(grad: Tensor, shape: AttentionShape, group: ProcessGroup) -> Tensor:
    """The transpose of align: gradients of aligned blocks -> the gradient of the rank's shard.

    The rows of a key/value head that several blocks use get the sum of their gradients.
    """
    p = group.size()
    if shape.num_kv_heads % p == 0:
        return grad
    plan = _plan(shape, p, group.rank(), grad.device)
    total = grad.new_zeros(shape.qkv_size // p, *grad.shape[1:])
    for part, total_part in plan.column_chunks(grad, total):
        used = part.new_zeros(sum(plan.num_received), *part.shape[1:])
        used.index_add_(0, plan.place, part)
        received = _all_to_all_rows(used, plan.num_received, plan.num_sent, group)
        for rows, addend in zip(plan.rows_for, received.split(plan.num_sent), strict=True):
            total_part[rows] += addend
    return total


@dataclass(frozen=True)
class _Plan:
    rows_for: tuple[Tensor, ...]  # by rank: the rows of this shard that its block has, ascending
    num_received: list[int]  # by rank: the rows of this rank's block that it holds
    place: Tensor  # for each row of this rank's block, where it is among the rows received
    num_chunks: int

    @property
    def num_sent(self) -> list[int]:
        return [len(rows) for rows in self.rows_for]

    def column_chunks(self, x: Tensor, y: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Columns of both, so few at once that no buffer of an all_to_all exceeds a block.

        A rank whose key head all blocks use sends it p times.
        """
        if x.dim() == 1:
            return [(x, y)]
        return zip(x.chunk(self.num_chunks, 1), y.chunk(self.num_chunks, 1), strict=True)


@lru_cache(maxsize=64)
def _plan(shape: AttentionShape, p: int, rank: int, device: torch.device) -> _Plan:
    size = shape.qkv_size // p
    used = [rows.unique() for rows in (_block_rows(shape, p, r) for r in range(p))]
    mine = _block_rows(shape, p, rank)
    most_sent = int(torch.bincount(torch.cat(used) // size).max())
    return _Plan(
        rows_for=tuple((rows[rows // size == rank] - rank * size).to(device) for rows in used),
        num_received=torch.bincount(used[rank] // size, minlength=p).tolist(),
        place=torch.searchsorted(used[rank], mine).to(device),
        num_chunks=ceil(most_sent / len(mine)),
    )


def _block_rows(shape: AttentionShape, p: int, rank: int) -> Tensor:
    """The rows of the full qkv that the aligned block of `rank` has, in its order."""
    per_slot, per_group, d = heads_per_slot(shape, p), shape.heads_per_group, shape.head_dim
    heads: list[int] = []  # indices into the n + 2g heads of linear_qkv, 2n + 2g with gates
    num_heads, (*before, _, _) = shape.num_heads // p, shape.slot(per_group)
    for first in range(rank * num_heads, (rank + 1) * num_heads, per_slot):
        start = first // per_group * (sum(before) + 2)
        for query in range(start + first % per_group, start + sum(before), per_group):
            heads += range(query, query + per_slot)  # queries, then their gates
        heads += [start + sum(before), start + sum(before) + 1]
    return (torch.tensor(heads)[:, None] * d + torch.arange(d)).flatten()


def _all_to_all_rows(
    x: Tensor, num_sent: list[int], num_received: list[int], group: ProcessGroup
) -> Tensor:
    """Rows of x, in the order of their destinations -> rows in the order of their sources."""
    received = x.new_empty(sum(num_received), *x.shape[1:])
    to_others = len(x) - num_sent[group.rank()]
    record("all_to_all", to_others * (x[0].nbytes if len(x) else 0))
    works = transport.all_to_all(received, x, group, num_received=num_received, num_sent=num_sent)
    return Pending(received, works, x).wait()
