"""Attention over a ring: queries stay, key/value chunks go round, the next while one is used.

Partial results are merged by log-sum-exp. In the backward, the gradients of a chunk of keys and
values travel with it, in float32; its owner uses it last, so that p-1 hops bring them home. From
"Ring Attention with Blockwise Transformers for Near-Infinite Context" (Liu et al., 2023). Of packed
documents, and within a narrow window, ranks send each other only what is seen (routes.py).
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies.blocks import Span
from megatron_paradyse.strategies.joined_blocks import share_no_rows
from megatron_paradyse.strategies.local_attention import (
    AttentionTask,
    PartialOutput,
    add_gradients_,
    new_gradients,
)
from megatron_paradyse.strategies.routes import exchange_among
from megatron_paradyse.strategies.softmax_offset import offset_gradient


def ring_attention(
    q: Tensor,
    kv: Tensor,
    *,
    spans_of_ranks: tuple[tuple[Span, ...], ...],
    task: AttentionTask,
    group: ProcessGroup,
    offset: Tensor | None = None,
) -> Tensor:
    """q [s/p, b, n, d], keys and values kv [2, s/p, b, g, d] -> [s/p, b, n, d].

    spans_of_ranks[r] are the positions that rank r's chunk holds. Keeps q, kv, the output and
    its lse. Sends kv p-1 times forward; as often backward, and as often its float32 gradients.
    Where blocks.sends_what_is_seen, to each rank the part that its queries see. offset [n] as of
    softmax_offset.py.
    """
    return _RingAttention.apply(q, kv, offset, spans_of_ranks, task, group)


def ring_forward(
    q: Tensor,
    kv: Tensor,
    *,
    spans_of_ranks: tuple[tuple[Span, ...], ...],
    task: AttentionTask,
    group: ProcessGroup,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output [s/p, b, n, d] and its lse [b, n, s/p], for use inside an autograd Function."""
    q_spans, partial = spans_of_ranks[group.rank()], PartialOutput(q)
    exchange = exchange_among(spans_of_ranks, task, group, dim=1)
    for source, chunk in exchange.chunks(kv):
        k_spans = exchange.spans_from[source]
        partial.add(chunk[0], chunk[1], q_spans=q_spans, k_spans=k_spans, task=task)
        del chunk
    return partial.result(offset)


def ring_backward(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    spans_of_ranks: tuple[tuple[Span, ...], ...],
    task: AttentionTask,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and of kv, given what ring_forward took and returned."""
    q_spans = spans_of_ranks[group.rank()]
    exchange = exchange_among(spans_of_ranks, task, group, dim=1)
    travelling = exchange.gradient()
    narrow = exchange.is_alone and share_no_rows(task.blocks_for(q, q_spans, q_spans))
    (grad_q,) = new_gradients(q, narrow=narrow)
    for source, chunk in exchange.chunks(kv, backward=True):
        (grad_kv,) = new_gradients(chunk, narrow=narrow)
        add_gradients_(
            (grad_q, grad_kv[0], grad_kv[1]), grad_out, q, chunk[0], chunk[1], out, lse,
            q_spans=q_spans, k_spans=exchange.spans_from[source], task=task,
        )  # fmt: skip
        travelling.add(grad_kv)
        del chunk, grad_kv
    return grad_q.to(q.dtype), travelling.home().to(kv.dtype)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx, q, kv, offset, spans_of_ranks, task, group):
        ctx.ring = {"spans_of_ranks": spans_of_ranks, "task": task, "group": group}
        out, lse = ring_forward(q, kv, **ctx.ring, offset=offset)
        ctx.save_for_backward(q, kv, offset, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, kv, offset, out, lse = ctx.saved_tensors
        grad_offset = offset_gradient(grad_out, out, lse, offset)
        grads = ring_backward(grad_out, q, kv, out, lse, **ctx.ring)
        return *grads, grad_offset, None, None, None
