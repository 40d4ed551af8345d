"""The same layer on one process, from whole weights: what every strategy must equal.

Written without the strategies' blocks, kernels and merges: explicit masks from positions, one dense
softmax, autograd. Any dtype; float64 in tests. Quadratic in memory.

AttentionWeights and MlpWeights hold the full tensors here, the layout of p = 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    Microbatch,
    MlpShape,
    MlpWeights,
)
from megatron_paradyse.strategies.dropout import keep_mask


def reference_attention(
    x: Tensor,
    weights: AttentionWeights,
    shape: AttentionShape,
    microbatch: Microbatch,
    *,
    from_output: bool = False,
) -> Tensor:
    """[s, b, h] -> [s, b, h], before the output bias.

    from_output: gradients of scores in a half type as of kernels that keep no probabilities, with
    rowsum(grad_out out) of the output as it is rounded.
    """
    s, b, _ = x.shape
    n, g, d = shape.num_heads, shape.num_kv_heads, shape.head_dim
    qkv = x @ weights.qkv.t()
    if weights.qkv_bias is not None:
        qkv = qkv + weights.qkv_bias
    qkv = qkv.reshape(s, b, g, -1, d)
    q, k, v = qkv[:, :, :, : n // g].reshape(s, b, n, d), qkv[:, :, :, -2], qkv[:, :, :, -1]
    if shape.qk_norm is not None:
        q = _normalise(q, weights.q_norm, weights.q_norm_bias, shape)
        k = _normalise(k, weights.k_norm, weights.k_norm_bias, shape)
    if microbatch.rope is not None:
        q, k = (_rotate(t, microbatch.rope, shape) for t in (q, k))
    k, v = (t.repeat_interleave(n // g, dim=2) for t in (k, v))
    scores = torch.einsum("qbnd,kbnd->bnqk", q, k)
    probs, lse = _probabilities(scores, weights.softmax_offset, shape, microbatch)
    out = torch.einsum("bnqk,kbnd->qbnd", probs.to(v.dtype), v)
    if from_output:
        out = _with_rounded_row_sums(out, probs, lse, v)
    if shape.output_gate:
        gate = qkv[:, :, :, n // g : -2].reshape(s, b, n, d)
        wide = gate if gate.dtype == torch.float64 else gate.float()
        opening = 1 / (1 + torch.exp(-wide))
        out = torch.einsum("qbnd,qbnd->qbnd", out.to(wide.dtype), opening).to(out.dtype)
    return out.reshape(s, b, n * d) @ weights.proj.t()


def reference_mlp(x: Tensor, weights: MlpWeights, shape: MlpShape) -> Tensor:
    """[s, b, h] -> [s, b, h], before the output bias."""
    y = x @ weights.fc1.t()
    if weights.fc1_bias is not None:
        y = y + weights.fc1_bias
    if shape.gated:
        gate, up = y.chunk(2, dim=-1)
        y = shape.activation(gate) * up
    else:
        y = shape.activation(y)
    return y @ weights.fc2.t()


def visible_pairs(shape: AttentionShape, microbatch: Microbatch, device=None) -> Tensor:
    """[b, s, s] bool: whether the query at dim 1 sees the key at dim 2."""
    s, b = microbatch.seq_length, microbatch.batch_size
    position = torch.arange(s, device=device)
    document = torch.zeros(b, s, dtype=torch.long, device=device)
    if microbatch.documents is not None:
        document.fill_(-1)
        for sequence, ranges in enumerate(microbatch.documents):
            for index, (start, stop) in enumerate(ranges):
                document[sequence, start:stop] = index
    visible = (document[:, :, None] == document[:, None, :]) & (document >= 0)[:, :, None]
    behind = position[:, None] - position[None, :]
    if shape.causal:
        visible = visible & (behind >= 0)
    if shape.window is not None:
        visible = visible & (behind < shape.window)
    return visible


def _probabilities(
    scores: Tensor, offset: Tensor | None, shape: AttentionShape, microbatch: Microbatch
) -> tuple[Tensor, Tensor]:
    """Softmax over the visible keys, after dropout; 0 where a query sees none. [b, n, s, s]

    And the log-sum-exp [b, n, s].
    """
    if scores.dtype != torch.float64:
        scores = scores.float()
    visible = visible_pairs(shape, microbatch, scores.device)[:, None]
    scores = (scores * shape.softmax_scale).masked_fill(~visible, float("-inf"))
    blind = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)
    if offset is not None:  # the logit of one more key, whose value is 0
        beside = offset.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, beside), dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., : microbatch.seq_length].masked_fill(blind, 0.0)
    if shape.dropout > 0.0:
        b, n, s, _ = probs.shape
        keep = keep_mask(
            microbatch.dropout_seed,
            sequences=torch.arange(b, device=probs.device),
            heads=torch.arange(n, device=probs.device),
            queries=torch.arange(s, device=probs.device),
            keys=torch.arange(s, device=probs.device),
            dropout=shape.dropout,
        )
        probs = probs * keep / (1.0 - shape.dropout)
    return probs, scores.logsumexp(-1)


def _with_rounded_row_sums(out: Tensor, probs: Tensor, lse: Tensor, v: Tensor) -> Tensor:
    """out itself, whose gradient of scores is P (grad_out v - rowsum(grad_out out)).

    Autograd has the row sum of what out was before its rounding. The gradient of lse is P: by its
    way comes the difference.
    """
    with torch.no_grad():
        rounding = out - torch.einsum("bnqk,kbnd->qbnd", probs, v.to(probs.dtype))
    nothing = (lse - lse.detach()).permute(2, 0, 1)[..., None]
    return (out.to(rounding.dtype) - rounding * nothing).to(out.dtype)


def _normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: AttentionShape):
    dtype = x.dtype
    x = x if dtype == torch.float64 else x.float()
    if shape.qk_norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + shape.qk_norm_eps)
    if weight is not None:
        x = x * (weight + 1 if shape.qk_norm_plus_one else weight)
    if bias is not None:
        x = x + bias
    return x.to(dtype)


def _rotate(x: Tensor, angles: Tensor, shape: AttentionShape) -> Tensor:
    d_rot = angles.shape[-1]
    channel = torch.arange(d_rot, device=x.device)
    if shape.rope_interleaved:
        partner, sign = channel ^ 1, 1 - 2 * (channel % 2 == 0).to(x.dtype)
    else:
        partner = (channel + d_rot // 2) % d_rot
        sign = 1 - 2 * (channel < d_rot // 2).to(x.dtype)
    cos, sin = (t[:, None, None].to(x.dtype) for t in (angles.cos(), angles.sin()))
    turned = shape.rope_scale * (x[..., :d_rot] * cos + x[..., partner] * sign * sin)
    return torch.cat((turned, x[..., d_rot:]), dim=-1)


def shard_attention(weights: AttentionWeights, p: int, rank: int) -> AttentionWeights:
    """The shards of rank `rank` of p: even shares of rows, even in the middle of a head."""
    return replace(
        weights,
        qkv=weights.qkv.chunk(p)[rank],
        proj=weights.proj.chunk(p, dim=1)[rank],
        **{
            name: whole.chunk(p)[rank]
            for name in ("qkv_bias", "softmax_offset", "kv_up")
            if (whole := getattr(weights, name)) is not None
        },
    )


def shard_mlp(weights: MlpWeights, shape: MlpShape, p: int, rank: int) -> MlpWeights:
    """The shards of rank `rank` of p; of a gated fc1, its gate rows and then its up rows."""

    def rows(full: Tensor) -> Tensor:
        parts = full.chunk(2) if shape.gated else (full,)
        return torch.cat([part.chunk(p)[rank] for part in parts])

    return MlpWeights(
        fc1=rows(weights.fc1),
        fc2=weights.fc2.chunk(p, dim=1)[rank],
        fc1_bias=None if weights.fc1_bias is None else rows(weights.fc1_bias),
    )
