"""ColossalZ: ring self-attention with whole score rows; weights by ZeRO-3.

    attention   x [s/p, b, h] -> qkv of all heads [s/p, b, n] -> K goes round: scores [s/p, s]
                -> softmax -> V goes round: output -> proj
    mlp         zero_mlp

Each rank holds the complete score rows of its queries, so that the softmax is an ordinary one:
memory is quadratic in s by design. From "Sequence Parallelism: Long Sequence Training from System
Perspective" (Li et al., 2021), the ring self-attention of Colossal-AI.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies.blocks import contiguous_spans
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    Microbatch,
    Strategy,
    check_layout,
)
from megatron_paradyse.strategies.dropout import keep_mask_of_ranges
from megatron_paradyse.strategies.local_attention import (
    AttentionTask,
    accumulation_dtype,
    new_gradients,
)
from megatron_paradyse.strategies.ring import TravellingGradient, ring_chunks
from megatron_paradyse.strategies.tiled_kernel import hide_, per_kv_head, per_query_head
from megatron_paradyse.strategies.zero import gather_weight, zero_mlp, zero_proj, zero_qkv


def attention(
    x: Tensor,
    weights: AttentionWeights,
    shape: AttentionShape,
    microbatch: Microbatch,
    group: ProcessGroup,
) -> Tensor:
    """[s/p, b, h] -> [s/p, b, h]. Besides weights, k and then v go round the ring.

    Keeps, besides q, k, v and the output, the probabilities [b, n, s/p, s].
    """
    spans = contiguous_spans(microbatch, group.size(), group.rank())
    q, k, v = zero_qkv(x, weights, shape, microbatch, group, spans=spans)
    proj = gather_weight(weights.proj.t(), group)
    out = _RowAttention.apply(AttentionTask(shape, microbatch), group, q, k, v)
    del q, k, v
    return zero_proj(out, proj, weights, group)


class _RowAttention(Function):
    """q [s/p, b, n, d], k and v [s/p, b, g, d] -> [s/p, b, n, d]; inside, heads before sequence."""

    @staticmethod
    def forward(ctx, task, group, q, k, v):
        q, k, v = (x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v))
        probs = _score_rows(q, k, task, group).to(q.dtype)
        out = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))
        for source, columns, v_chunk in _ring(v, group):
            part = probs[..., columns]
            keep = _keep(part, task, group, source)
            out += per_query_head(part if keep is None else part * keep, v_chunk)
            del v_chunk
        out = out.permute(2, 0, 1, 3).to(q.dtype, memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, v, probs)
        ctx.task, ctx.group = task, group
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, probs = ctx.saved_tensors
        task, group = ctx.task, ctx.group
        wide = accumulation_dtype(q.dtype)
        grad_out = grad_out.permute(1, 2, 0, 3).contiguous()  # [s/p, b, n, d] -> [b, n, s/p, d]
        grad_scores = torch.empty_like(probs, dtype=wide)  # first of the probabilities
        grad_v = TravellingGradient(group)
        for source, columns, v_chunk in _ring(v, group, own_last=True):
            part = probs[..., columns]
            grad_part = per_query_head(grad_out, v_chunk.transpose(-1, -2)).to(wide)
            keep = _keep(part, task, group, source)
            if keep is not None:
                part, grad_part = part * keep, grad_part.mul_(keep)
            grad_scores[..., columns] = grad_part
            grad_v.add(per_kv_head(part, grad_out, v_chunk).to(wide))
            del part, grad_part, keep, v_chunk
        # dS = P (dP - rowsum(P dP)), in place
        row_sums = grad_scores.mul_(probs).sum(-1, keepdim=True)
        grad_scores.addcmul_(probs, row_sums, value=-1).mul_(task.shape.softmax_scale)
        (grad_q,) = new_gradients(q)
        grad_k = TravellingGradient(group)
        for _, columns, k_chunk in _ring(k, group, own_last=True):
            part = grad_scores[..., columns].to(q.dtype)
            grad_q += per_query_head(part, k_chunk)
            grad_k.add(per_kv_head(part, q, k_chunk).to(wide))
            del part, k_chunk
        grads = (grad_q, grad_k.home(), grad_v.home())
        return None, None, *(g.to(q.dtype).permute(2, 0, 1, 3) for g in grads)


def _score_rows(q: Tensor, k: Tensor, task: AttentionTask, group: ProcessGroup) -> Tensor:
    """Softmax over all s keys of q k^T [b, n, s/p, s], as k goes round; 0 where none is seen."""
    p, microbatch = group.size(), task.microbatch
    dtype = accumulation_dtype(q.dtype)
    scores = q.new_full((*q.shape[:3], microbatch.seq_length), float("-inf"), dtype=dtype)
    q_spans = contiguous_spans(microbatch, p, group.rank())
    for source, columns, k_chunk in _ring(k, group):
        for block in task.blocks(q_spans, contiguous_spans(microbatch, p, source)):
            sequences, rows, keys = (
                slice(*part) for part in (block.sequences, block.q_rows, block.k_rows)
            )
            part = per_query_head(
                q[sequences, :, rows], k_chunk[sequences, :, keys].transpose(-1, -2)
            )
            part = part.to(dtype) * task.shape.softmax_scale
            num_rows, num_keys = part.shape[-2:]
            hide_(part, task.rule(block), slice(0, num_rows), slice(0, num_keys))
            scores[sequences, :, rows, columns][..., keys] = part
        del k_chunk
    # In place, for the largest buffer there is; a row that sees nothing becomes 0, not 0/0.
    largest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(dtype).min)
    probs = scores.sub_(largest).exp_()
    return probs.div_(probs.sum(-1, keepdim=True).clamp_(min=torch.finfo(dtype).tiny))


def _ring(x: Tensor, group: ProcessGroup, *, own_last: bool = False):
    """Yield (source rank, its columns, its x), as ring_chunks."""
    size = x.shape[-2]
    for source, chunk in ring_chunks(x, group, own_last=own_last):
        yield source, slice(source * size, (source + 1) * size), chunk
        del chunk


def _keep(probs: Tensor, task: AttentionTask, group: ProcessGroup, source: int) -> Tensor | None:
    """The scaled dropout mask of the columns from `source`, or None."""
    dropout = task.shape.dropout
    if dropout == 0.0:
        return None
    b, n, rows, columns = probs.shape
    first = group.rank() * rows
    keep = keep_mask_of_ranges(
        task.microbatch.dropout_seed,
        sequences=range(b),
        heads=range(n),
        queries=range(first, first + rows),
        keys=range(source * columns, (source + 1) * columns),
        dropout=dropout,
        device=probs.device,
    )
    return keep.to(probs.dtype) / (1.0 - dropout)


STRATEGY = Strategy(
    name="colossal_z", title="ColossalZ", attention=attention, mlp=zero_mlp, check=check_layout
)
