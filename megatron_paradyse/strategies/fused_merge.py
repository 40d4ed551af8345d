"""Merging by log-sum-exp on a CUDA device in one kernel: each value is read once and written once.

Twice as many bytes as a copy of the output; PyTorch's operations, one after the other, move some
five times as many. Needs Triton (with_triton.py), which PyTorch's CUDA builds for Linux bring
along.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_paradyse.strategies.with_triton import has_triton

TILE_ELEMENTS = 8192
# What differs from length to length: another kernel for each would be compiled in training.
OF_LENGTHS = ("sq", "lse_b", "lse_n", "block_lse_b", "block_lse_n")


def can_merge(out: Tensor, block_out: Tensor) -> bool:
    """Whether merge_on_device_ takes these: real float32 sums on a CUDA device, rows of one piece.

    Fake tensors are no plain Tensor.
    """
    return (
        type(out) is Tensor
        and out.is_cuda
        and out.dtype == torch.float32
        and out.stride(-1) == block_out.stride(-1) == 1
        and out.numel() > 0
        and has_triton()
    )


def merge_on_device_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """As local_attention.merge_; block_out is only read."""
    import triton

    sq, b, n, d = out.shape
    width = triton.next_power_of_2(d)
    rows = max(1, TILE_ELEMENTS // width)
    strides = (*out.stride()[:3], *lse.stride(), *block_out.stride()[:3], *block_lse.stride())
    _kernel()[(triton.cdiv(sq, rows), n, b)](
        out, lse, block_out, block_lse, sq, d, *strides, ROWS=rows, WIDTH=width
    )


@functools.cache
def _kernel():
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=OF_LENGTHS, do_not_specialize_on_alignment=("lse", "block_lse"))
    def merge(
        out, lse, block_out, block_lse, sq, d,
        out_s, out_b, out_n, lse_b, lse_n, lse_s,
        block_s, block_b, block_n, block_lse_b, block_lse_n, block_lse_s,
        ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, WIDTH)
        in_rows = row < sq
        inside = in_rows[:, None] & (column < d)[None, :]
        lse_at = lse + sequence * lse_b + head * lse_n + row * lse_s
        block_lse_at = block_lse + sequence * block_lse_b + head * block_lse_n + row * block_lse_s
        before = tl.load(lse_at, mask=in_rows, other=float("-inf"))
        more = tl.load(block_lse_at, mask=in_rows, other=float("-inf")).to(tl.float32)
        seen = more > float("-inf")
        # sigmoid(more - before) with no exponential that overflows, and log-sum-exp likewise
        high, low = tl.maximum(before, more), tl.minimum(before, more)
        small = tl.where(low > float("-inf"), tl.exp(low - high), 0.0)
        weight = tl.where(seen, tl.where(more >= before, 1.0, small) / (1.0 + small), 0.0)
        at = out + sequence * out_b + head * out_n + row[:, None] * out_s + column[None, :]
        block_at = block_out + sequence * block_b + head * block_n
        block_at += row[:, None] * block_s + column[None, :]
        value = tl.load(at, mask=inside, other=0.0)
        added = tl.load(block_at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, value + weight[:, None] * (added - value), mask=inside)
        tl.store(lse_at, tl.where(seen, high + tl.log(1.0 + small), before), mask=in_rows)

    return merge
