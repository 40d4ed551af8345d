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
from torch.autograd import Function
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies.blocks import contiguous_spans
from megatron_paradyse.strategies.collectives import transpose_blocks
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    Microbatch,
    Strategy,
    check_whole_heads,
)
from megatron_paradyse.strategies.head_attention import head_attention
from megatron_paradyse.strategies.latents import of_values
from megatron_paradyse.strategies.local_attention import AttentionTask
from megatron_paradyse.strategies.order import to_positions, to_rows
from megatron_paradyse.strategies.softmax_offset import in_float
from megatron_paradyse.strategies.zero import gather_weight, zero_mlp, zero_proj, zero_qkv
from megatron_paradyse.strategies.zero_tiles import zero_mlp_in_tiles


def attention(
    x: Tensor,
    weights: AttentionWeights,
    shape: AttentionShape,
    microbatch: Microbatch,
    group: ProcessGroup,
) -> Tensor:
    """[s/p, b, h] -> [s/p, b, h]. Besides weights, two all_to_alls forward and two backward."""
    p, rank = group.size(), group.rank()
    holders = microbatch.sequence_group(group)
    spans = contiguous_spans(microbatch, holders.size(), holders.rank())
    q, k, v, gate = zero_qkv(x, weights, shape, microbatch, group, spans=spans)
    proj = gather_weight(weights.proj.t(), group)
    packed = _pack_heads(q, k, v, p)
    del q, k, v  # so that no more than two copies of them are ever alive
    packed = transpose_blocks(packed, group).flatten(0, 1)  # [s, b, (n + 2g') / p, d]
    packed = to_positions(packed, microbatch)
    num_heads, num_kv_heads = shape.num_heads // p, num_kv_heads_sent(shape, p) // p
    q, k, v = packed.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    task = AttentionTask(shape, microbatch, first_head=rank * num_heads)
    out = head_attention(q, k, v, task=task, offset=in_float(weights.softmax_offset))
    del packed, q, k, v
    out = to_rows(of_values(out, shape), microbatch)
    out = transpose_blocks(out.unflatten(0, (p, -1)), group)  # [p, s/p, b, n/p, d]
    return zero_proj(out.permute(1, 2, 0, 3, 4), proj, weights, group, gate=gate)


def check(shape: AttentionShape, p: int) -> None:
    """Each rank needs whole query heads."""
    check_whole_heads("ulysses_z", shape, p)


def num_kv_heads_sent(shape: AttentionShape, p: int) -> int:
    """Key/value heads after replication: the fewest that split evenly and align with queries."""
    return lcm(shape.num_kv_heads, p)


def _pack_heads(q: Tensor, k: Tensor, v: Tensor, p: int) -> Tensor:
    """q [s/p, b, n, d], k and v [s/p, b, g, d] -> [p, s/p, b, (n + 2g') / p, d].

    Block i is for rank i: its query heads, then the key and the value heads that these use. g' is
    g, or more where ranks share a head.
    """
    copies = p // gcd(k.shape[2], p)
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=2), v.repeat_interleave(copies, dim=2)
    if q.shape[2] > p == k.shape[2]:
        k, v = _OwnGradient.apply(k), _OwnGradient.apply(v)
    elif q.shape[2] == p and copies > 1:
        q = _OwnGradient.apply(q)
    by_rank = [x.unflatten(2, (p, -1)).permute(2, 0, 1, 3, 4) for x in (q, k, v)]
    return torch.cat(by_rank, dim=3)


class _OwnGradient(Function):
    """x, whose gradient is no view: of one head a rank it would be, and keep the others' alive."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous()


STRATEGY = Strategy(
    name="ulysses_z",
    title="UlyssesZ",
    attention=attention,
    mlp=zero_mlp,
    check=check,
    tiled_mlp=zero_mlp_in_tiles,
    takes_offset=True,
    takes_latents=True,
    takes_gate=True,
    takes_wide=True,
)
