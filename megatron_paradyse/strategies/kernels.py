"""The attention kernels, all with one signature, and the one function that chooses among them.

    forward(q, k, v, rule)                            -> out, lse
    backward(grad_out, q, k, v, out, lse, rule)       -> grad_q, grad_k, grad_v

    q, out [b, n, sq, d]    k, v [b, g, sk, d]    lse [b, n, sq], float32 (float64 for float64)

The backward takes the out and lse of all keys, of which this call's may be only a part: that is
what a ring needs.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_paradyse.strategies.document_kernels import (
    cuda_flash_documents_backward,
    cuda_flash_documents_forward,
    flash_attn_documents_backward,
    flash_attn_documents_forward,
)
from megatron_paradyse.strategies.flash_versions import why_not_used
from megatron_paradyse.strategies.fused_tiles import can_fuse, fused_backward, fused_forward
from megatron_paradyse.strategies.small_calls import in_small_calls
from megatron_paradyse.strategies.tiled_kernel import BlockRule, tiled_backward, tiled_forward

aten = torch.ops.aten
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernel:
    """for_documents: the same over many documents in one call (document_kernels.py), or None."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, BlockRule], tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]
    has_window: bool = False
    for_documents: Kernel | None = None


def choose_kernel(q: Tensor, *, window: bool = False, dropout: bool = False) -> Kernel:
    """The kernel for queries like q [..., d]; `window` and `dropout` say what it must mask."""
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
    asked = q.device.type, capability, q.dtype, q.shape[-1]
    if dropout:
        return _choose_tiled(*asked)
    kernel = _choose(*asked)
    return _choose_tiled(*asked) if window and not kernel.has_window else kernel


@lru_cache
def _choose(device: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> Kernel:
    kernel = _choose_tiled(device, capability, dtype, head_dim)
    if device == "cpu":
        kernel = CPU_FLASH
    elif device == "cuda" and runs_flash(capability, dtype, head_dim):
        kernel = _flash_kernel()
    elif device == "cuda" and _runs_efficient(capability, dtype, head_dim):
        kernel = CUDA_EFFICIENT
    logger.info("attention of head dim %s in %s on %s: %s", head_dim, dtype, device, kernel.name)
    return kernel


def _choose_tiled(
    device: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int
) -> Kernel:
    """One that takes dropout and windows."""
    fuses = device == "cuda" and can_fuse(capability, dtype, head_dim)
    return FUSED_TILES if fuses else TILED


def _flash_kernel() -> Kernel:
    version, why_not = _flash_attn_package()
    if why_not:
        return replace(CUDA_FLASH, name=f"{CUDA_FLASH.name} ({why_not})")
    return replace(FLASH_ATTN, name=f"{FLASH_ATTN.name} {version}") if version else CUDA_FLASH


def runs_flash(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    """FlashAttention, on a GPU of this compute capability."""
    if dtype not in (torch.bfloat16, torch.float16) or capability < (8, 0):
        return False
    # Its backward for head dims of 193 to 224 needs more shared memory than these chips have.
    small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return head_dim % 8 == 0 and head_dim <= 256 and not (small and 192 < head_dim <= 224)


def _runs_efficient(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> bool:
    """It loads 16 bytes at once, and knows bfloat16 from compute capability 8.0 on."""
    if dtype == torch.float64 or (dtype == torch.bfloat16 and capability < (8, 0)):
        return False
    return head_dim * dtype.itemsize % 16 == 0


@lru_cache
def _flash_attn_package() -> tuple[str, str]:
    """The version of the FlashAttention package, "" if there is none, and why not to use it.

    A package built for another PyTorch is found but cannot be imported.
    """
    try:
        version = metadata.version("flash_attn")
    except metadata.PackageNotFoundError:
        return "", ""
    if why_not := why_not_used(version):
        return version, why_not
    try:
        importlib.import_module("flash_attn.flash_attn_interface")
    except Exception as error:  # whatever a broken extension raises
        return version, f"FlashAttention {version} cannot be imported: {type(error).__name__}"
    return version, ""


def _cpu_flash_forward(q, k, v, rule):
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, rule.causal, scale=rule.scale
    )


def _cpu_flash_backward(grad_out, q, k, v, out, lse, rule):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, rule.causal, scale=rule.scale
    )


def _window(q: Tensor, k: Tensor, rule: BlockRule) -> tuple[int, int]:
    """How many keys a query sees to the left and to the right of its own; -1: all.

    The flash kernels take the last query's own key to be the last key, wherever these lie. Beside a
    bound on the left, all on the right are as many as there are keys, not counted from the first.
    """
    left = -1
    if rule.window is not None:
        assert q.shape[2] <= k.shape[2], "blocks.py cuts others in two"
        left = rule.window - 1 - (rule.q_start - rule.k_start) + k.shape[2] - q.shape[2]
        assert left >= 0, "rows that see no key are not in the block"
    return left, 0 if rule.causal else -1


def _cuda_flash_forward(q, k, v, rule):
    left, right = _window(q, k, rule)
    q, k, v = _rows_first(q, k, v)
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, rule.causal, False,
        scale=rule.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _cuda_flash_backward(grad_out, q, k, v, out, lse, rule):
    left, right = _window(q, k, rule)
    grad_out, q, k, v, out = _rows_first(grad_out, q, k, v, out)
    # Random state is read only with dropout, cumulative lengths only for packed inputs.
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    grads = aten._flash_attention_backward(
        grad_out, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1],
        0.0, rule.causal, unused, unused,
        scale=rule.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return _rows_first(*grads)


def _rows_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[b, n, s, d] <-> [b, s, n, d], views."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _cuda_efficient_forward(q, k, v, rule):
    group = q.shape[1] // k.shape[1]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, _repeat(k, group), _repeat(v, group), None, True, 0.0, rule.causal, scale=rule.scale
    )
    return out, lse[..., : q.shape[2]].contiguous()  # the kernel pads the rows to 32


def _cuda_efficient_backward(grad_out, q, k, v, out, lse, rule):
    group = q.shape[1] // k.shape[1]
    lse = pad(lse, (0, -q.shape[2] % 32), value=float("inf"))
    # The kernel takes the rows of out to be n d apart, whatever its strides say.
    (out,) = _rows_first(_rows_first(out)[0].contiguous())
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, _repeat(k, group), _repeat(v, group), None, out, lse, unused, unused,
        0.0, [True, True, True, False], rule.causal, scale=rule.scale,
    )  # fmt: skip
    return grad_q, _sum_repeats(grad_k, group), _sum_repeats(grad_v, group)


def _repeat(x: Tensor, times: int) -> Tensor:
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _sum_repeats(x: Tensor, times: int) -> Tensor:
    return x if times == 1 else x.unflatten(1, (-1, times)).sum(2)


def _flash_attn_forward(q, k, v, rule):
    from flash_attn.flash_attn_interface import _flash_attn_forward as forward

    left, right = _window(q, k, rule)
    out, lse, *_ = forward(
        *_rows_first(q, k, v), dropout_p=0.0, softmax_scale=rule.scale, causal=rule.causal,
        window_size_left=left, window_size_right=right, softcap=0.0, alibi_slopes=None,
        return_softmax=False,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _flash_attn_backward(grad_out, q, k, v, out, lse, rule):
    from flash_attn.flash_attn_interface import _flash_attn_backward as backward

    left, right = _window(q, k, rule)
    grad_out, q, k, v, out = _rows_first(grad_out, q, k, v, out)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    backward(
        grad_out, q, k, v, out, lse.contiguous(), *grads, dropout_p=0.0, softmax_scale=rule.scale,
        causal=rule.causal, window_size_left=left, window_size_right=right, softcap=0.0,
        alibi_slopes=None, deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return _rows_first(*grads)


CPU_FLASH = Kernel("torch CPU flash", _cpu_flash_forward, _cpu_flash_backward)
CUDA_FLASH = Kernel(
    "torch CUDA flash",
    _cuda_flash_forward,
    in_small_calls(_cuda_flash_backward),
    has_window=True,
    for_documents=Kernel(
        "torch CUDA flash",
        cuda_flash_documents_forward,
        in_small_calls(cuda_flash_documents_backward),
    ),
)
CUDA_EFFICIENT = Kernel("torch CUDA efficient", _cuda_efficient_forward, _cuda_efficient_backward)
FLASH_ATTN = Kernel(
    "FlashAttention",
    _flash_attn_forward,
    in_small_calls(_flash_attn_backward),
    has_window=True,
    for_documents=Kernel(
        "FlashAttention",
        flash_attn_documents_forward,
        in_small_calls(flash_attn_documents_backward),
    ),
)
FUSED_TILES = Kernel("fused tiles (Triton)", fused_forward, fused_backward, has_window=True)
TILED = Kernel("tiled torch operations", tiled_forward, tiled_backward, has_window=True)
