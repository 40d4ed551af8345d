"""UlyssesZ: an all_to_all turns sequence shards into head shards and back; weights by ZeRO-3.

    attention   x [s/p, b, h] -> qkv of all heads [s/p, b, n] -> all_to_all -> [s, b, n/p]
                -> attention -> all_to_all -> [s/p, b, n] -> proj
    mlp         zero_mlp

From "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models" (Jacobs et al., 2023).
"""

from __future__ import annotations

from math import gcd, lcm

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies.blocks import contiguous_spans, whole
from megatron_paradyse.strategies.collectives import transpose_blocks
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    Microbatch,
    Strategy,
    check_layout,
)
from megatron_paradyse.strategies.local_attention import AttentionTask, local_attention
from megatron_paradyse.strategies.zero import zero_attention, zero_mlp


def attention(
    x: Tensor,
    weights: AttentionWeights,
    shape: AttentionShape,
    microbatch: Microbatch,
    group: ProcessGroup,
) -> Tensor:
    """[s/p, b, h] -> [s/p, b, h]. Besides weights, two all_to_alls forward and two backward."""
    p, rank = group.size(), group.rank()
    task = AttentionTask(shape, microbatch, first_head=rank * shape.num_heads // p)

    def inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _sequence_to_heads(q, k, v, group)
        out = local_attention(q, k, v, spans=whole(microbatch), task=task)
        return _heads_to_sequence(out, group)

    spans = contiguous_spans(microbatch, p, rank)
    return zero_attention(x, weights, shape, microbatch, group, spans=spans, inner=inner)


def check(shape: AttentionShape, p: int) -> None:
    """Each rank needs whole query heads."""
    check_layout(shape, p)
    n = shape.num_heads
    if n % p:
        fitting = gcd(n, p)
        remedy = f"use megatron_cz, or p={fitting}" if fitting > 1 else "use megatron_cz"
        raise UserError(f"ulysses_z needs n % p == 0, got n={n}, p={p}: {remedy}")


def num_kv_heads_sent(shape: AttentionShape, p: int) -> int:
    """Key/value heads after replication: the fewest that split evenly and align with queries."""
    return lcm(shape.num_kv_heads, p)


def _sequence_to_heads(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> tuple[Tensor, ...]:
    """q [s/p, b, n, d], k and v [s/p, b, g, d] -> [s, b, n/p, d] and twice [s, b, g'/p, d].

    One all_to_all of all three, packed. g' is g, or more where ranks must share a head.
    """
    p = group.size()
    copies = p // gcd(k.shape[2], p)
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=2), v.repeat_interleave(copies, dim=2)
    # [s/p, b, heads, d] -> [s/p, b, p, heads/p, d], side by side for each destination
    packed = torch.cat([x.unflatten(2, (p, -1)) for x in (q, k, v)], dim=3)
    received = transpose_blocks(packed.permute(2, 0, 1, 3, 4), group)  # [p, s/p, b, heads/p, d]
    sizes = (q.shape[2] // p, k.shape[2] // p, v.shape[2] // p)
    q, k, v = received.flatten(0, 1).split(sizes, dim=2)
    return q, k, v


def _heads_to_sequence(out: Tensor, group: ProcessGroup) -> Tensor:
    """[s, b, n/p, d] -> [s/p, b, n, d]."""
    received = transpose_blocks(out.unflatten(0, (group.size(), -1)), group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


STRATEGY = Strategy(
    name="ulysses_z", title="UlyssesZ", attention=attention, mlp=zero_mlp, check=check
)
