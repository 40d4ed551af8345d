"""Attention of the queries and keys that one rank holds, block by block, merged by log-sum-exp.

Layouts: q, out [sq, b, n, d]; k, v [sk, b, g, d], views of any stride; lse [b, n, sq] in float32
(float64 for float64). Partial results and gradients accumulate in float32 (float64).

A query in no document gets out 0, lse -inf and gradients 0: no kernel ever sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_paradyse.strategies.blocks import Block, Span, blocks_of
from megatron_paradyse.strategies.contract import AttentionShape, Microbatch
from megatron_paradyse.strategies.fused_merge import can_merge, merge_on_device_
from megatron_paradyse.strategies.joined_blocks import (
    first_of_their_queries,
    join_documents,
    share_no_rows,
)
from megatron_paradyse.strategies.kernels import Kernel, choose_kernel
from megatron_paradyse.strategies.softmax_offset import offset_gradient, with_offset_
from megatron_paradyse.strategies.tiled_kernel import BlockRule


@dataclass(frozen=True)
class AttentionTask:
    """What a rank's attention must know besides its tensors; first_head is global (dropout)."""

    shape: AttentionShape
    microbatch: Microbatch
    first_head: int = 0

    def blocks(self, q_spans: tuple[Span, ...], k_spans: tuple[Span, ...]) -> tuple[Block, ...]:
        return blocks_of(q_spans, k_spans, self.shape, self.microbatch)

    def blocks_for(
        self, q: Tensor, q_spans: tuple[Span, ...], k_spans: tuple[Span, ...]
    ) -> tuple[Block, ...]:
        """As few as the kernel for such queries can take."""
        blocks = self.blocks(q_spans, k_spans)
        if self.microbatch.shards is None or len(blocks) < 2:
            return blocks
        return join_documents(blocks) if self._kernel(q).for_documents else blocks

    def rule(self, block: Block) -> BlockRule:
        return BlockRule(
            scale=self.shape.softmax_scale,
            causal=block.causal,
            window=block.window,
            q_start=block.q_start,
            k_start=block.k_start,
            dropout=self.shape.dropout,
            dropout_seed=self.microbatch.dropout_seed,
            first_sequence=block.sequences[0],
            first_head=self.first_head,
            parts=block.parts,
        )

    def kernel(self, q: Tensor, block: Block) -> Kernel:
        kernel = self._kernel(q, window=block.window is not None)
        if not block.parts:
            return kernel
        assert kernel.for_documents is not None
        return kernel.for_documents

    def _kernel(self, q: Tensor, *, window: bool = False) -> Kernel:
        return choose_kernel(q, window=window, dropout=self.shape.dropout > 0.0)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class PartialOutput:
    """The attention output of q so far; add() more keys in any order, then result()."""

    def __init__(self, q: Tensor):
        self.q = q
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(
        self,
        k: Tensor,
        v: Tensor,
        *,
        q_spans: tuple[Span, ...],
        k_spans: tuple[Span, ...],
        task: AttentionTask,
    ) -> None:
        """Attend to k and v, which hold the positions k_spans."""
        blocks = task.blocks_for(self.q, q_spans, k_spans)
        first = [False] * len(blocks)
        packed = task.microbatch.shards is not None
        if packed and self._out is None and not any(_covers(block, self.q) for block in blocks):
            first = first_of_their_queries(blocks)
            self._make_room(self.q.dtype if all(first) else accumulation_dtype(self.q.dtype))
        for block, is_first in zip(blocks, first, strict=True):
            self._add_block(block, k, v, task, is_first)

    def _add_block(
        self, block: Block, k: Tensor, v: Tensor, task: AttentionTask, is_first: bool
    ) -> None:
        q_part, k_part, v_part = _cut(block, self.q, (k, v))
        kernel = task.kernel(self.q, block)
        out, lse = kernel.forward(q_part, k_part, v_part, task.rule(block))
        out = out.permute(2, 0, 1, 3)
        if self._out is None and _covers(block, self.q):
            self._out, self._lse = out, lse
            return
        if not is_first:
            self._widen()
        assert self._out is not None and self._lse is not None
        rows, sequences = slice(*block.q_rows), slice(*block.sequences)
        of_block = self._out[rows, sequences], self._lse[sequences, :, rows]
        if is_first:
            for whole, part in zip(of_block, (out, lse), strict=True):
                whole.copy_(part)
        else:
            merge_(*of_block, out, lse)

    def _make_room(self, dtype: torch.dtype) -> None:
        """For every query."""
        sq, b, n, _ = self.q.shape
        self._out = torch.zeros_like(self.q, dtype=dtype, memory_format=torch.contiguous_format)
        wide = accumulation_dtype(self.q.dtype)
        self._lse = self.q.new_full((b, n, sq), float("-inf"), dtype=wide)

    def _widen(self) -> None:
        """Have room in the accumulation dtype."""
        dtype = accumulation_dtype(self.q.dtype)
        if self._out is None:
            self._make_room(dtype)
        assert self._out is not None
        self._out = self._out.to(dtype)

    def result(self, offset: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """out [sq, b, n, d] in the dtype of q, contiguous, and lse [b, n, sq]; once.

        offset [n]: the softmax has one more key (softmax_offset.py).
        """
        if self._out is None:
            self._widen()
        assert self._out is not None and self._lse is not None
        lse = with_offset_(self._out, self._lse, offset)
        return self._out.to(self.q.dtype).contiguous(), lse


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge, in place, attention over more keys into attention over some.

    out, block_out [sq, b, n, d]; lse, block_lse [b, n, sq]. With lse' = logaddexp(lse, block_lse):
    out' = out + exp(block_lse - lse') (block_out - out), whose weight is
    sigmoid(block_lse - lse): no exponential can overflow. Where neither saw a key, out stays 0.
    block_out is used up.
    """
    if can_merge(out, block_out):
        merge_on_device_(out, lse, block_out, block_lse)
        return
    weight = torch.sigmoid(block_lse - lse)
    weight.masked_fill_(block_lse == float("-inf"), 0.0)
    weight = weight.permute(2, 0, 1)[..., None]  # [b, n, sq] -> [sq, b, n, 1]
    out.add_(block_out.to(out.dtype).sub_(out).mul_(weight))
    torch.logaddexp(lse, block_lse, out=lse)


def add_gradients_(
    grads: Sequence[Tensor],
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    q_spans: tuple[Span, ...],
    k_spans: tuple[Span, ...],
    task: AttentionTask,
) -> None:
    """Add to grads = (grad_q, grad_k, grad_v) those of q's attention to k and v.

    out and lse are q's over all keys, wherever they are. grads are of accumulation_dtype, or of q's
    where each of their rows is added to once.
    """
    for block in task.blocks_for(q, q_spans, k_spans):
        parts = _block_gradients(block, grad_out, q, k, v, out, lse, task)
        rows = (block.q_rows, block.k_rows, block.k_rows)
        for i in range(3):
            grads[i][slice(*rows[i]), slice(*block.sequences)].add_(parts[i])
        del parts  # before the next block's come


def _block_gradients(block, grad_out, q, k, v, out, lse, task):
    """Gradients of the block's part of q, k and v, each [rows, sequences, heads, d]."""
    q_part, k_part, v_part = _cut(block, q, (k, v))
    grad_part, out_part, _ = _cut(block, grad_out, (out, out), like_queries=True)
    lse_part = lse[slice(*block.sequences), :, slice(*block.q_rows)]
    grads = task.kernel(q, block).backward(
        grad_part, q_part, k_part, v_part, out_part, lse_part.contiguous(), task.rule(block)
    )
    return tuple(grad.permute(2, 0, 1, 3) for grad in grads)


def _cut(block: Block, q: Tensor, others: tuple[Tensor, Tensor], *, like_queries: bool = False):
    """[s, b, n, d] -> the block's [sequences, n, rows, d], a view, of q and of two others."""
    rows = (block.q_rows, *(2 * (block.q_rows if like_queries else block.k_rows,)))
    return tuple(
        x[slice(*r), slice(*block.sequences)].permute(1, 2, 0, 3)
        for x, r in zip((q, *others), rows, strict=True)
    )


def _covers(block: Block, q: Tensor) -> bool:
    return block.q_rows == (0, q.shape[0]) and block.sequences == (0, q.shape[1])


class _LocalAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, offset, q_spans, k_spans, task):
        partial = PartialOutput(q)
        partial.add(k, v, q_spans=q_spans, k_spans=k_spans, task=task)
        out, lse = partial.result(offset)
        ctx.save_for_backward(q, k, v, offset, out, lse)
        ctx.q_spans, ctx.k_spans, ctx.task = q_spans, k_spans, task
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k, v, offset, out, lse = ctx.saved_tensors
        blocks = ctx.task.blocks_for(q, ctx.q_spans, ctx.k_spans)
        if len(blocks) == 1 and _covers(blocks[0], q) and blocks[0].k_rows == (0, k.shape[0]):
            grads = _block_gradients(blocks[0], grad_out, q, k, v, out, lse, ctx.task)
        else:
            grads = new_gradients(q, k, v, narrow=share_no_rows(blocks))
            add_gradients_(
                grads, grad_out, q, k, v, out, lse,
                q_spans=ctx.q_spans, k_spans=ctx.k_spans, task=ctx.task,
            )  # fmt: skip
        grad_offset = offset_gradient(grad_out, out, lse, offset)
        return *(grad.to(q.dtype) for grad in grads), grad_offset, None, None, None


def new_gradients(*tensors: Tensor, narrow: bool = False) -> tuple[Tensor, ...]:
    """Zeros like the tensors, contiguous, in the accumulation dtype; narrow: in their own."""
    return tuple(
        x.new_zeros(x.shape, dtype=x.dtype if narrow else accumulation_dtype(x.dtype))
        for x in tensors
    )


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans: tuple[Span, ...],
    task: AttentionTask,
    k_spans: tuple[Span, ...] | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """q [sq, b, n, d] at positions `spans`, k and v [sk, b, g, d] -> [sq, b, n, d].

    k and v hold the positions `k_spans`, or the same as q. offset [n] as of softmax_offset.py.
    Keeps q, k, v, the output and its lse.
    """
    k_spans = spans if k_spans is None else k_spans
    return _LocalAttention.apply(q, k, v, offset, spans, k_spans, task)
