"""MegatronTS: tensor parallelism with sequence parallelism, as Megatron-LM runs it.

    attention   x [s/p, b, h] -> all_gather -> qkv of the rank's heads [s, b, n/p] -> attention
                -> proj -> reduce_scatter -> [s/p, b, h]
    mlp         x -> all_gather -> fc1 [s, b, f/p] -> activation -> fc2 -> reduce_scatter

Weights stay where they are. The backward gathers x again, so that only [s/p, b, h] of it is kept.
From "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al., 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies.blocks import whole
from megatron_paradyse.strategies.collectives import (
    all_gather,
    all_gather_async,
    gather_sequence,
    reduce_scatter,
    reduce_scatter_async,
)
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    LatentSizes,
    Microbatch,
    MlpShape,
    MlpWeights,
    Strategy,
    check_layout,
)
from megatron_paradyse.strategies.feedforward import activate, activation_gradient
from megatron_paradyse.strategies.head_attention import head_attention
from megatron_paradyse.strategies.heads import Heads, normalise_and_rotate, split_heads
from megatron_paradyse.strategies.latents import latent_heads, of_values, split_latents
from megatron_paradyse.strategies.local_attention import AttentionTask
from megatron_paradyse.strategies.order import to_positions, to_rows
from megatron_paradyse.strategies.output_gate import with_gate
from megatron_paradyse.strategies.second_run import is_second_run, without_values
from megatron_paradyse.strategies.softmax_offset import in_float


def attention(
    x: Tensor,
    weights: AttentionWeights,
    shape: AttentionShape,
    microbatch: Microbatch,
    group: ProcessGroup,
) -> Tensor:
    """[s/p, b, h] -> [s/p, b, h]. Sends 2 (p-1) s/p b h values forward, 3 of these backward."""
    p, rank = group.size(), group.rank()
    gate = None
    if shape.latent is None:
        qkv = _ColumnLinear.apply(x, weights.qkv, weights.qkv_bias, group)
        q, k, v, gate = _heads_of_rank(to_positions(qkv, microbatch), shape, group)
        del qkv
    else:
        q, k, v = _heads_of_latents(x, weights, shape.latent, microbatch, group)
    q, k = normalise_and_rotate(q, k, weights, shape, microbatch, whole(microbatch))
    task = AttentionTask(shape, microbatch, first_head=rank * shape.num_heads // p)
    out = head_attention(q, k, v, task=task, offset=in_float(weights.softmax_offset))
    del q, k, v
    out = with_gate(of_values(out, shape), gate)
    out = to_rows(out, microbatch).flatten(2)
    return _RowLinear.apply(out, weights.proj, group, None)


def mlp(x: Tensor, weights: MlpWeights, shape: MlpShape, group: ProcessGroup) -> Tensor:
    """[s/p, b, h] -> [s/p, b, h]. Sends as much as attention; keeps x and fc1's output."""
    y = _ColumnLinear.apply(x, weights.fc1, weights.fc1_bias, group)
    return _RowLinear.apply(y, weights.fc2, group, shape)


def check(shape: AttentionShape, p: int) -> None:
    """Each rank needs whole query heads, and whole key/value heads or an even share of one."""
    check_layout(shape, p)
    n, g = shape.num_heads, shape.num_kv_heads
    if n % p:
        raise UserError(f"megatron_ts needs n % p == 0, got n={n}, p={p}: use megatron_cz")
    if g % p and p % g:
        raise UserError(
            f"megatron_ts needs g % p == 0 or p % g == 0, got g={g}, p={p}: use megatron_cz"
        )


def _heads_of_rank(qkv: Tensor, shape: AttentionShape, group: ProcessGroup) -> Heads:
    """[s, b, (n + 2g) d / p] -> q and gates [s, b, n/p, d], k and v [s, b, max(g/p, 1), d].

    With g < p the shards cut heads anywhere: all of them are gathered, as Megatron does, and the
    rank takes its query heads and the key/value head that those use.
    """
    p, rank, g, d = group.size(), group.rank(), shape.num_kv_heads, shape.head_dim
    if g >= p:
        return split_heads(qkv, shape, heads_per_group=shape.heads_per_group)
    by_rank = gather_sequence(qkv[None], group)  # -> [p, s, b, (n + 2g) d / p]
    mixed = by_rank.permute(1, 2, 0, 3).flatten(2).unflatten(2, (g, -1, d))
    heads = mixed[:, :, rank // (p // g)]  # [s, b, n/g + 2, d], with gates [s, b, 2n/g + 2, d]
    num_heads = shape.num_heads // p
    first = rank % (p // g) * num_heads
    q, *gate, k, v = heads.split(shape.slot(shape.heads_per_group), dim=2)
    q, *gate = (part[:, :, first : first + num_heads].contiguous() for part in (q, *gate))
    return q, k.contiguous(), v.contiguous(), gate[0] if gate else None


def _heads_of_latents(
    x: Tensor,
    weights: AttentionWeights,
    sizes: LatentSizes,
    microbatch: Microbatch,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rank's heads; the latents are gathered, fewer values than the layer's input."""
    assert microbatch.rope is not None
    c_q, c_kv, c_pe = split_latents(x, sizes)
    parts = (
        _ColumnLinear.apply(c_q, weights.qkv, None, group),
        _ColumnLinear.apply(c_kv, weights.kv_up, None, group),
        gather_sequence(c_pe.contiguous(), group),
    )
    q, kv, c_pe = (to_positions(part, microbatch) for part in parts)
    return latent_heads(q, kv, c_pe, sizes, num_rotated=microbatch.rope.shape[-1])


class _ColumnLinear(Function):
    """[s/p, b, h] x [o/p, h] -> [s, b, o/p]. Keeps x and nothing gathered."""

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.has_bias = group, bias is not None
        return torch.nn.functional.linear(all_gather(x, group), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        gathering = all_gather_async(x, ctx.group)
        partial_grad_x = grad @ weight  # while x is gathered
        x = gathering.wait()
        scattering = reduce_scatter_async(partial_grad_x, ctx.group)
        grad_weight = grad.flatten(0, 1).t() @ x.flatten(0, 1)  # while grad_x is scattered
        grad_bias = grad.sum((0, 1)) if ctx.has_bias else None
        return scattering.wait(), grad_weight, grad_bias, None


class _RowLinear(Function):
    """[s, b, i/p] x [h, i/p] -> [s/p, b, h], after an activation if a MlpShape is given.

    Keeps the input before the activation, which the backward runs again. If the output of an MLP is
    unused it computes and sends nothing.
    """

    @staticmethod
    def forward(ctx, y, weight, group, mlp_shape):
        ctx.save_for_backward(y, weight)
        ctx.group, ctx.mlp_shape = group, mlp_shape
        if mlp_shape is not None and is_second_run():
            return without_values(y, (len(y) // group.size(), y.shape[1], len(weight)))
        if mlp_shape is not None:
            y = activate(y, mlp_shape)
        return reduce_scatter(y @ weight.t(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, weight = ctx.saved_tensors
        gathering = all_gather_async(grad, ctx.group)
        active = y if ctx.mlp_shape is None else activate(y, ctx.mlp_shape)
        grad = gathering.wait()
        grad_weight = grad.flatten(0, 1).t() @ active.flatten(0, 1)
        del active
        grad_y = grad @ weight
        if ctx.mlp_shape is not None:
            grad_y = activation_gradient(y, grad_y, ctx.mlp_shape)
        return grad_y, grad_weight, None, None


STRATEGY = Strategy(
    name="megatron_ts",
    title="MegatronTS",
    attention=attention,
    mlp=mlp,
    check=check,
    takes_offset=True,
    takes_latents=True,
    takes_gate=True,
    takes_wide=True,
)
