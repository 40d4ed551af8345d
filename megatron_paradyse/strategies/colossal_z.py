"""ColossalZ: ring self-attention with whole score rows; weights by ZeRO-3.

    attention   x [s/p, b, h] -> qkv of all heads [s/p, b, n] -> K goes round: scores [s/p, s]
                -> softmax -> V goes round: output -> proj
    mlp         zero_mlp

Each rank holds the complete score rows of its queries, so that the softmax is an ordinary one:
memory is quadratic in s by design; of packed documents, and within a narrow window, a row has the
keys that some query of the rank sees. From "Sequence Parallelism: Long Sequence Training from
System Perspective" (Li et al., 2021), the ring self-attention of Colossal-AI.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies.blocks import Span, contiguous_spans
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    Microbatch,
    Strategy,
    check_layout,
)
from megatron_paradyse.strategies.dropout import keep_mask
from megatron_paradyse.strategies.latents import of_values
from megatron_paradyse.strategies.local_attention import (
    AttentionTask,
    accumulation_dtype,
    new_gradients,
)
from megatron_paradyse.strategies.routes import exchange_among
from megatron_paradyse.strategies.softmax_offset import whole_offset
from megatron_paradyse.strategies.tiled_kernel import hide_, per_kv_head, per_query_head
from megatron_paradyse.strategies.zero import gather_weight, zero_mlp, zero_proj, zero_qkv
from megatron_paradyse.strategies.zero_tiles import zero_mlp_in_tiles


def attention(
    x: Tensor,
    weights: AttentionWeights,
    shape: AttentionShape,
    microbatch: Microbatch,
    group: ProcessGroup,
) -> Tensor:
    """[s/p, b, h] -> [s/p, b, h]. Besides weights, k and then v go round the ring.

    Keeps, besides q, k, v and the output, the probabilities [b, n, s/p, s], or so many of the s
    columns as the rank's queries see keys, of packed documents and within a narrow window.
    """
    ring = microbatch.sequence_group(group)
    spans = contiguous_spans(microbatch, ring.size(), ring.rank())
    q, k, v, gate = zero_qkv(x, weights, shape, microbatch, group, spans=spans)
    proj = gather_weight(weights.proj.t(), group)
    offset = whole_offset(weights, group)
    out = _RowAttention.apply(AttentionTask(shape, microbatch), ring, q, k, v, offset)
    del q, k, v
    return zero_proj(of_values(out, shape), proj, weights, group, gate=gate)


class _RowAttention(Function):
    """q [s/p, b, n, d], k and v [s/p, b, g, d] -> [s/p, b, n, d]; inside, heads before sequence."""

    @staticmethod
    def forward(ctx, task, group, q, k, v, offset):
        rows = _Rows(task, group)
        q, k, v = (x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v))
        probs, beside = _score_rows(q, k, rows, offset)
        probs = probs.to(q.dtype)
        out = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))
        for source, v_chunk in rows.exchange.chunks(v):
            part = probs[..., rows.columns[source]]
            keep = rows.keep(part, source)
            out += per_query_head(part if keep is None else part * keep, v_chunk)
            del v_chunk
        if rows.keep_scale != 1.0:
            out *= rows.keep_scale
        out = out.permute(2, 0, 1, 3).to(q.dtype, memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, v, probs, beside)
        ctx.rows = rows
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k, v, probs, beside = ctx.saved_tensors
        rows = ctx.rows
        wide = accumulation_dtype(q.dtype)
        grad_out = grad_out.permute(1, 2, 0, 3).contiguous()  # [s/p, b, n, d] -> [b, n, s/p, d]
        grad_scores = torch.empty_like(probs, dtype=wide)  # first of the probabilities
        grad_v = rows.exchange.gradient()
        for source, v_chunk in rows.exchange.chunks(v, backward=True):
            columns = rows.columns[source]
            part = probs[..., columns]
            grad_part = per_query_head(grad_out, v_chunk.transpose(-1, -2)).to(wide)
            keep = rows.keep(part, source)
            if keep is not None:
                part, grad_part = part * keep, grad_part.mul_(keep).mul_(rows.keep_scale)
            grad_scores[..., columns] = grad_part
            grad_part = per_kv_head(part, grad_out, v_chunk).to(wide)
            grad_v.add(grad_part if keep is None else grad_part.mul_(rows.keep_scale))
            del part, grad_part, keep, v_chunk
        # dS = P (dP - rowsum(P dP)), in place
        row_sums = grad_scores.mul_(probs).sum(-1, keepdim=True)
        grad_offset = None if beside is None else -(beside * row_sums).sum((0, 2, 3))
        grad_scores.addcmul_(probs, row_sums, value=-1).mul_(rows.task.shape.softmax_scale)
        (grad_q,) = new_gradients(q)
        grad_k = rows.exchange.gradient()
        for source, k_chunk in rows.exchange.chunks(k, backward=True):
            part = grad_scores[..., rows.columns[source]].to(q.dtype)
            grad_q += per_query_head(part, k_chunk)
            grad_k.add(per_kv_head(part, q, k_chunk).to(wide))
            del part, k_chunk
        del grad_scores, grad_out
        grads = (grad_q, grad_k.home(), grad_v.home())
        of_rows = (g.to(q.dtype).permute(2, 0, 1, 3) for g in grads)
        return None, None, *of_rows, grad_offset


class _Rows:
    """The score rows of a rank: which positions their rows are, and which of whom their columns."""

    def __init__(self, task: AttentionTask, group: ProcessGroup):
        p, self.task = group.size(), task
        spans_of_ranks = tuple(contiguous_spans(task.microbatch, p, r) for r in range(p))
        self.spans = spans_of_ranks[group.rank()]
        self.exchange = exchange_among(spans_of_ranks, task, group, dim=-2)
        widths = [sum(map(len, spans)) for spans in self.exchange.spans_from]
        ends = itertools.accumulate(widths, initial=0)
        self.columns = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
        self.num_columns = sum(widths)
        self.keep_scale = 1.0 / (1.0 - task.shape.dropout)  # in a half type it would be rounded

    def keep(self, probs: Tensor, source: int) -> Tensor | None:
        """1 where dropout keeps a column from `source`, else 0; None without dropout."""
        dropout = self.task.shape.dropout
        if dropout == 0.0:
            return None
        b, n, _, _ = probs.shape
        keep = keep_mask(
            self.task.microbatch.dropout_seed,
            sequences=torch.arange(b, device=probs.device),
            heads=torch.arange(n, device=probs.device),
            queries=_positions(self.spans, probs.device),
            keys=_positions(self.exchange.spans_from[source], probs.device),
            dropout=dropout,
        )
        return keep.to(probs.dtype)


def _positions(spans: tuple[Span, ...], device: torch.device) -> Tensor:
    parts = [torch.arange(span.start, span.stop, device=device) for span in spans]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def _score_rows(
    q: Tensor, k: Tensor, rows: _Rows, offset: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Softmax over all keys that come, [b, n, s/p, s] of a whole ring; 0 where none is seen.

    And [b, n, s/p, 1], the share of the key that an offset [n] adds; None without.
    """
    task, dtype = rows.task, accumulation_dtype(q.dtype)
    scores = q.new_full((*q.shape[:3], rows.num_columns), float("-inf"), dtype=dtype)
    for source, k_chunk in rows.exchange.chunks(k):
        for block in task.blocks(rows.spans, rows.exchange.spans_from[source]):
            sequences, queries, keys = (
                slice(*part) for part in (block.sequences, block.q_rows, block.k_rows)
            )
            part = per_query_head(
                q[sequences, :, queries], k_chunk[sequences, :, keys].transpose(-1, -2)
            )
            part = part.to(dtype) * task.shape.softmax_scale
            num_rows, num_keys = part.shape[-2:]
            hide_(part, task.rule(block), slice(0, num_rows), slice(0, num_keys))
            scores[sequences, :, queries, rows.columns[source]][..., keys] = part
        del k_chunk
    # In place, for the largest buffer there is; a row that sees nothing becomes 0, not 0/0.
    largest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(dtype).min)
    if offset is not None:
        largest = torch.maximum(largest, offset[:, None, None])
    probs = scores.sub_(largest).exp_()
    total = probs.sum(-1, keepdim=True).clamp_(min=torch.finfo(dtype).tiny)
    if offset is None:
        return probs.div_(total), None
    beside = torch.exp(offset[:, None, None] - largest)
    total += beside
    return probs.div_(total), beside.div_(total)


STRATEGY = Strategy(
    name="colossal_z",
    title="ColossalZ",
    attention=attention,
    mlp=zero_mlp,
    check=check_layout,
    tiled_mlp=zero_mlp_in_tiles,
    takes_offset=True,
    takes_latents=True,
    takes_gate=True,
    takes_wide=True,
)
