"""The tiled kernel's attention on a CUDA device in Triton: dropout by hash, windows, any head dim.

A tile of scores is made, masked, dropped from and used where it is, so that nothing of the size of
scores is ever in memory. Three kernels: outputs with their log-sum-exp; gradients of q, which leave
the rows' sums of out times gradient; gradients of k and v, of all heads that share them. No two
programs add to one place: results are the same every time.

Needs Triton (with_triton.py), which PyTorch's CUDA builds for Linux bring along.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_paradyse.strategies.dropout import FIRST_KEY, row_base
from megatron_paradyse.strategies.tiled_kernel import BlockRule
from megatron_paradyse.strategies.with_triton import has_triton

MOST_CHANNELS = 256
LEAST_CAPABILITY = (8, 0)  # whose tensor cores know bfloat16


def can_fuse(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a CUDA device of this compute capability runs the kernels, here."""
    return are_written_for(capability, dtype, head_dim) and has_triton()


def are_written_for(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    """Whether such a device would run them with Triton."""
    known = dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and head_dim <= MOST_CHANNELS and capability >= LEAST_CAPABILITY


def fused_forward(q: Tensor, k: Tensor, v: Tensor, rule: BlockRule) -> tuple[Tensor, Tensor]:
    """As tiled_forward."""
    import triton

    from megatron_paradyse.strategies import fused_tiles_kernels as kernels

    q, k, v = _with_channels_last(q, k, v)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    b, n, sq = q.shape[:3]
    tile = tile_of(q)
    kernels.forward[(triton.cdiv(sq, tile["ROWS"]), n, b)](
        q, k, v, out, lse, *_numbers(q, k, rule),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        **choices(q, k, rule), **tile,
    )  # fmt: skip
    return out, lse


def fused_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: BlockRule
) -> tuple[Tensor, Tensor, Tensor]:
    """As tiled_backward."""
    import triton

    from megatron_paradyse.strategies import fused_tiles_kernels as kernels

    grad_out, q, k, v, out = _with_channels_last(grad_out, q, k, v, out)
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
    lse, sums = lse.contiguous(), torch.empty_like(lse, memory_format=torch.contiguous_format)
    (b, n, sq, _), (g, sk) = q.shape, k.shape[1:3]
    strides = [s for x in (q, k, v, grad_out) for s in x.stride()[:3]]
    fixed, tile = choices(q, k, rule), tile_of(q)
    numbers = _numbers(q, k, rule)
    kernels.of_queries[(triton.cdiv(sq, tile["ROWS"]), n, b)](
        q, k, v, grad_out, out, lse, sums, grad_q, *numbers, *strides,
        *out.stride()[:3], *grad_q.stride()[:3], **fixed, **tile,
    )  # fmt: skip
    kernels.of_keys[(triton.cdiv(sk, tile["COLUMNS"]), g, b)](
        q, k, v, grad_out, lse, sums, grad_k, grad_v, *numbers, *strides,
        *grad_k.stride()[:3], *grad_v.stride()[:3], **fixed, **tile,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _with_channels_last(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _numbers(q: Tensor, k: Tensor, rule: BlockRule) -> tuple[int | float, ...]:
    """Lengths, where the block lies, and what dropout hashes; 32 bits as they are, signed."""
    threshold = int(rule.dropout * 2**32)
    keep_scale = 1.0 / (1.0 - rule.dropout)
    return (
        *(q.shape[2], k.shape[2], rule.q_start, rule.k_start, rule.window or 0),
        *(rule.first_sequence, rule.first_head),
        *(_signed(row_base(rule.dropout_seed)), _signed(threshold), rule.scale, keep_scale),
    )


def _signed(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number


def choices(q: Tensor, k: Tensor, rule: BlockRule) -> dict[str, int | bool]:
    """What a kernel is compiled for."""
    return {
        "CAUSAL": rule.causal,
        "WINDOW": rule.window is not None,
        "DROPS": rule.dropout > 0.0,
        "GROUP": q.shape[1] // k.shape[1],
        "D": q.shape[3],
        "WIDTH": max(16, 1 << (q.shape[3] - 1).bit_length()),
        "FIRST_KEY": _signed(FIRST_KEY),
    }


def tile_of(q: Tensor) -> dict[str, int]:
    """Rows and columns of scores: what fits with its inputs into 99 KiB of shared memory."""
    wide = q.shape[3] > 128
    side = (16 if wide else 32) if q.dtype == torch.float32 else (32 if wide else 64)
    return {"ROWS": side, "COLUMNS": side, "num_warps": 8, "num_stages": 1}
