"""From the output of linear_qkv to queries, keys and values: split, normalise, rotate.

As Megatron does it: the split follows linear_qkv's layout, then the query and key norms, then RoPE.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from megatron_paradyse.strategies.blocks import Span
from megatron_paradyse.strategies.contract import AttentionShape, AttentionWeights, Microbatch
from megatron_paradyse.strategies.rms_norm import rms_norm

Heads = tuple[Tensor, Tensor, Tensor, Tensor | None]  # q, k, v and the gate of each query head


def split_heads(qkv: Tensor, shape: AttentionShape, *, heads_per_group: int) -> Heads:
    """[s, b, g (n/g + 2) d] -> q [s, b, n, d], k and v [s, b, g, d], and the gates as q, or None.

    They are copies, not views, so that nothing keeps the mixed tensor alive.
    """
    s, b, _ = qkv.shape
    slot = shape.slot(heads_per_group)
    mixed = qkv.view(s, b, -1, sum(slot), shape.head_dim)
    parts = mixed.split(slot, dim=3)
    q, *gate, k, v = (part.contiguous().view(s, b, -1, shape.head_dim) for part in parts)
    return q, k, v, gate[0] if gate else None


def normalise_and_rotate(
    q: Tensor,
    k: Tensor,
    weights: AttentionWeights,
    shape: AttentionShape,
    microbatch: Microbatch,
    spans: tuple[Span, ...],
) -> tuple[Tensor, Tensor]:
    """Apply qk-norm and RoPE to q [s, b, n, d] and k [s, b, g, d], which hold positions `spans`."""
    if shape.qk_norm is not None:
        q = head_norm(q, weights.q_norm, weights.q_norm_bias, shape)
        k = head_norm(k, weights.k_norm, weights.k_norm_bias, shape)
    if microbatch.rope is not None:
        angles = angles_at(microbatch.rope, spans).to(q.device)[:, None, None, :]
        cos, sin = (t.mul_(shape.rope_scale).to(q.dtype) for t in (angles.cos(), angles.sin()))
        q = rotate(q, cos, sin, interleaved=shape.rope_interleaved)
        k = rotate(k, cos, sin, interleaved=shape.rope_interleaved)
    return q, k


def head_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: AttentionShape
) -> Tensor:
    """Normalise each head of x [..., d]: layernorm, rmsnorm, or l2, an rmsnorm without weight."""
    if weight is not None and shape.qk_norm_plus_one:
        return plus_one_norm(x, weight, bias, shape.qk_norm, shape.qk_norm_eps)
    eps = shape.qk_norm_eps
    if shape.qk_norm == "layernorm":
        return _layer_norm(x, weight, bias, eps)
    assert shape.qk_norm in ("rmsnorm", "l2"), shape.qk_norm
    return rms_norm(x, weight, eps)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if sums_in_half_type(x):
        weight, bias = (None if t is None else t.float() for t in (weight, bias))
        return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def sums_in_half_type(x: Tensor) -> bool:
    """Whether a LayerNorm goes in float32: PyTorch's CPU kernel sums gradients in a half type."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def plus_one_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str | None, eps: float
) -> Tensor:
    """layernorm or rmsnorm of x [..., d] times 1 + weight: a sum that a half type would round."""
    if not x.is_cuda:
        wide = torch.promote_types(weight.dtype, torch.float32)
        plus_one = 1 + weight.to(wide)
        if kind == "rmsnorm":
            return rms_norm(x, plus_one, eps)
        return _layer_norm(x, plus_one, None if bias is None else bias.to(wide), eps)
    size = x.shape[-1:]
    norm = F.layer_norm(x, size, eps=eps) if kind == "layernorm" else F.rms_norm(x, size, eps=eps)
    scaled = torch.addcmul(norm, norm, weight)
    return scaled if bias is None else scaled + bias


def angles_at(rope: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """The rows of rope [s, d_rot] at the global positions of the spans, in their order."""
    parts = [rope[span.start : span.stop] for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Rotate(Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        rotated = torch.empty_like(x)
        turning, still = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
        rotated[..., : cos.shape[-1]] = turning * cos + _quarter_turn(turning, interleaved) * sin
        rotated[..., cos.shape[-1] :] = still
        return rotated

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        result = grad.clone()
        turning = grad[..., : cos.shape[-1]]
        # The transpose of a quarter turn is the turn back.
        result[..., : cos.shape[-1]] = turning * cos - _quarter_turn(turning * sin, ctx.interleaved)
        return result, None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """RoPE: x [s, b, n, d] turned in its first d_rot channels, given cos and sin [s, 1, 1, d_rot].

    Channels pair as (i, i + d_rot/2), or interleaved as (2i, 2i + 1). As in Megatron, cosine and
    sine are of x's dtype, cast from float32. Keeps only them: the backward turns back.
    """
    return _Rotate.apply(x, cos, sin, interleaved)


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair (a, b) of channels -> (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
