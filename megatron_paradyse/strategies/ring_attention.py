"""Attention over a ring: queries stay, key/value chunks go round, the next while one is used.

Partial results are merged by log-sum-exp. In the backward, the gradients of a chunk of keys and
values travel with it, in float32, and come home after p hops. From "Ring Attention with Blockwise
Transformers for Near-Infinite Context" (Liu et al., 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies.blocks import Span
from megatron_paradyse.strategies.collectives import ring_exchange_async
from megatron_paradyse.strategies.local_attention import (
    AttentionTask,
    PartialOutput,
    add_gradients_,
    new_gradients,
)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans_of_ranks: tuple[tuple[Span, ...], ...],
    task: AttentionTask,
    group: ProcessGroup,
) -> Tensor:
    """q [s/p, b, n, d], k and v [s/p, b, g, d] -> [s/p, b, n, d].

    spans_of_ranks[r] are the positions that rank r's chunk holds. Keeps q, k, v, the output and
    its lse. Sends k and v p-1 times forward; p-1 times, and p times float32 gradients, backward.
    """
    return _RingAttention.apply(q, k, v, spans_of_ranks, task, group)


def ring_forward(
    q: Tensor,
    kv: Tensor,
    *,
    spans_of_ranks: tuple[tuple[Span, ...], ...],
    task: AttentionTask,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """q [s/p, b, n, d], kv = k and v [2, s/p, b, g, d] -> out [s/p, b, n, d], lse [b, n, s/p]."""
    p, rank = group.size(), group.rank()
    partial = PartialOutput(q)
    for step in range(p):
        coming = ring_exchange_async(kv, group) if step < p - 1 else None
        source = (rank - step) % p
        k, v = kv.unbind()
        partial.add(k, v, q_spans=spans_of_ranks[rank], k_spans=spans_of_ranks[source], task=task)
        del k, v
        if coming is not None:
            kv = coming.wait()
    return partial.result()


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in the dtype of q, given ring_forward's inputs and results."""
    p, rank = group.size(), group.rank()
    (grad_q,) = new_gradients(q)
    grad_coming = None
    for step in range(p):
        coming = ring_exchange_async(kv, group) if step < p - 1 else None
        (grad_kv,) = new_gradients(kv)
        k, v = kv.unbind()
        grad_k, grad_v = grad_kv.unbind()
        add_gradients_(
            (grad_q, grad_k, grad_v), grad_out, q, k, v, out, lse,
            q_spans=spans_of_ranks[rank], k_spans=spans_of_ranks[(rank - step) % p], task=task,
        )  # fmt: skip
        del k, v
        if grad_coming is not None:
            grad_kv += grad_coming.wait()  # what the ranks before this one added
        grad_coming = ring_exchange_async(grad_kv, group)
        if coming is not None:
            kv = coming.wait()
    assert grad_coming is not None
    grad_k, grad_v = grad_coming.wait().to(q.dtype)
    return grad_q.to(q.dtype), grad_k, grad_v


class _RingAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, spans_of_ranks, task, group):
        kv = torch.stack((k, v))
        ctx.ring = {"spans_of_ranks": spans_of_ranks, "task": task, "group": group}
        out, lse = ring_forward(q, kv, **ctx.ring)
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        return *ring_backward(grad_out, *ctx.saved_tensors, **ctx.ring), None, None, None
