"""ZeRO-3 parts: linears whose weights are gathered when needed and freed at once.

A rank computes its own rows of the sequence with the full weight, and keeps of it only its shard.
The weight's gradient is a sum over the sequence, hence over ranks: it is reduce_scattered to the
shards, in float32. From "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(Rajbhandari et al., 2020), stage 3.

The strategies whose name ends in Z share zero_mlp, zero_qkv and zero_proj; they differ in the
attention between these two.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from megatron_paradyse.strategies.blocks import Span
from megatron_paradyse.strategies.collectives import (
    Pending,
    all_gather_async,
    reduce_gradient_async,
)
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    LatentSizes,
    Microbatch,
    MlpShape,
    MlpWeights,
)
from megatron_paradyse.strategies.feedforward import activate, activation_gradient
from megatron_paradyse.strategies.heads import Heads, normalise_and_rotate, split_heads
from megatron_paradyse.strategies.latents import latent_heads, split_latents
from megatron_paradyse.strategies.local_attention import accumulation_dtype
from megatron_paradyse.strategies.output_gate import with_gate
from megatron_paradyse.strategies.second_run import is_second_run, without_values


def zero_qkv(
    x: Tensor,
    weights: AttentionWeights,
    shape: AttentionShape,
    microbatch: Microbatch,
    group: ProcessGroup,
    *,
    spans: tuple[Span, ...],
) -> Heads:
    """x [s/p, b, h] at positions `spans` -> q [s/p, b, n, d], k and v [s/p, b, g, d].

    All heads, normalised and rotated; and the gate of the output, None without, for zero_proj.
    """
    gate = None
    if shape.latent is None:
        gathering = gather_weight(weights.qkv, group)
        qkv = zero_linear(x, gathering, weights.qkv, weights.qkv_bias, group)
        q, k, v, gate = split_heads(qkv, shape, heads_per_group=shape.heads_per_group)
        del qkv
    else:
        q, k, v = _heads_of_latents(x, weights, shape.latent, microbatch, group)
    q, k = normalise_and_rotate(q, k, weights, shape, microbatch, spans)
    return q, k, v, gate


def _heads_of_latents(
    x: Tensor,
    weights: AttentionWeights,
    sizes: LatentSizes,
    microbatch: Microbatch,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    assert weights.kv_up is not None and microbatch.rope is not None
    c_q, c_kv, c_pe = split_latents(x, sizes)
    gathering, coming = (gather_weight(w, group) for w in (weights.qkv, weights.kv_up))
    q = zero_linear(c_q, gathering, weights.qkv, None, group)
    kv = zero_linear(c_kv, coming, weights.kv_up, None, group)
    return latent_heads(q, kv, c_pe, sizes, num_rotated=microbatch.rope.shape[-1])


def zero_proj(
    out: Tensor,
    gathering: Pending,
    weights: AttentionWeights,
    group: ProcessGroup,
    *,
    gate: Tensor | None = None,
) -> Tensor:
    """out [s/p, b, n, d] -> [s/p, b, h], with gathering = gather_weight(weights.proj.t()).

    Heads may be several dimensions of out.
    """
    out = with_gate(out, gate).flatten(2)
    return zero_linear(out, gathering, weights.proj, None, group, transposed=True)


def zero_mlp(x: Tensor, weights: MlpWeights, shape: MlpShape, group: ProcessGroup) -> Tensor:
    """[s/p, b, h] -> [s/p, b, h]. Keeps x and fc1's output; fc2 is gathered while fc1 computes.

    Sends (p-1)/p of both weights forward; as much again, and their gradients, backward. If its
    output is unused, fc2 is not gathered and computes nothing.
    """
    fc1 = gather_weight(weights.fc1, group)
    fc2 = None if is_second_run() else gather_weight(weights.fc2.t(), group)
    y = zero_linear(x, fc1, weights.fc1, weights.fc1_bias, group)
    return zero_linear(y, fc2, weights.fc2, None, group, transposed=True, mlp_shape=shape)


def gather_weight(shard: Tensor, group: ProcessGroup) -> Pending:
    """Begin to gather the rows of a weight: [o/p, i] -> [o, i]."""
    return all_gather_async(shard.detach(), group)


def zero_linear(
    x: Tensor,
    gathering: Pending | None,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    *,
    transposed: bool = False,
    mlp_shape: MlpShape | None = None,
) -> Tensor:
    """x [s/p, b, i] -> [s/p, b, o], with the weight that is being gathered; None: without values.

    weight [o/p, i] and bias [o/p] are shards of rows; transposed: weight [o, i/p] is a shard of
    columns, and what is gathered is its transpose [i, o]. With mlp_shape, x passes the activation
    first. Keeps x and the shards. The backward gathers the weight again while it computes the
    weight's gradient, which is reduce_scattered while it computes that of x.
    """
    return _ZeroLinear.apply(x, weight, bias, gathering, group, transposed, mlp_shape)


class _ZeroLinear(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, gathering, group, transposed, mlp_shape):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.transposed, ctx.mlp_shape = group, transposed, mlp_shape
        if gathering is None:
            assert transposed and bias is None, "the last linear of an MLP"
            return without_values(x, (*x.shape[:-1], len(weight)))
        gathering_bias = None if bias is None else all_gather_async(bias, group)
        if mlp_shape is not None:
            x = activate(x, mlp_shape, num_shards=group.size())
        full = gathering.wait()
        full_bias = None if gathering_bias is None else gathering_bias.wait()
        return linear(x, full.t() if transposed else full, full_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        group, mlp_shape, p = ctx.group, ctx.mlp_shape, ctx.group.size()
        gathering = gather_weight(weight.t() if ctx.transposed else weight, group)
        reducing_weight = reducing_bias = None
        if ctx.needs_input_grad[1]:
            reducing_weight = _reduce_weight_gradient(ctx, x, grad)
        if ctx.needs_input_grad[2]:
            total = grad.sum((0, 1), dtype=accumulation_dtype(grad.dtype))
            reducing_bias = reduce_gradient_async(total, group)
        full = gathering.wait()
        grad_x = grad @ (full.t() if ctx.transposed else full)
        del full
        if mlp_shape is not None:
            grad_x = activation_gradient(x, grad_x, mlp_shape, num_shards=p)
        grad_weight = grad_bias = None
        if reducing_weight is not None:
            grad_weight = reducing_weight.wait().to(weight.dtype)
            grad_weight = grad_weight.t() if ctx.transposed else grad_weight
        if reducing_bias is not None:
            grad_bias = reducing_bias.wait().to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _reduce_weight_gradient(ctx, x: Tensor, grad: Tensor) -> Pending:
    """Begin to sum over ranks the gradient [o, i] of the full weight (transposed: [i, o])."""
    if ctx.mlp_shape is not None:
        x = activate(x, ctx.mlp_shape, num_shards=ctx.group.size())
    x, grad = x.flatten(0, 1), grad.flatten(0, 1)
    return reduce_gradient_async(x.t() @ grad if ctx.transposed else grad.t() @ x, ctx.group)
