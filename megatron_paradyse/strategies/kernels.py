"""The attention kernels, all with one signature, and the one function that chooses among them.

    forward(q, k, v, rule)                            -> out, lse
    backward(grad_out, q, k, v, out, lse, rule)       -> grad_q, grad_k, grad_v

    q, out [b, n, sq, d]    k, v [b, g, sk, d]    lse [b, n, sq], float32 (float64 for float64)

The backward takes the out and lse of all keys, of which this call's may be only a part: that is
what a ring needs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_paradyse.strategies.tiled_kernel import BlockRule, tiled_backward, tiled_forward

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    name: str
    forward: Callable[[Tensor, Tensor, Tensor, BlockRule], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def choose_kernel(q: Tensor, *, window: bool = False, dropout: bool = False) -> Kernel:
    """The kernel for queries like q [..., d]; `window` and `dropout` say what it must mask."""
    if window or dropout:
        return TILED
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
    return _choose(q.device.type, capability, q.dtype, q.shape[-1])


@lru_cache
def _choose(device: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> Kernel:
    if device == "cpu":
        return CPU_FLASH
    if device != "cuda" or dtype == torch.float64:
        return TILED
    half = dtype in (torch.bfloat16, torch.float16)
    if half and capability >= (8, 0) and head_dim % 8 == 0 and head_dim <= 256:
        return FLASH_ATTN if _flash_attn_is_installed() else CUDA_FLASH
    # The memory-efficient kernel loads 16 bytes at once, and knows bfloat16 from Ampere on.
    aligned = head_dim * dtype.itemsize % 16 == 0
    if aligned and (dtype != torch.bfloat16 or capability >= (8, 0)):
        return CUDA_EFFICIENT
    return TILED


def _flash_attn_is_installed() -> bool:
    """Whether the FlashAttention package has the signatures of 2.7 and later 2.x versions."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    import flash_attn

    major, minor = (int(part) for part in flash_attn.__version__.split(".")[:2])
    return major == 2 and minor >= 7


def _cpu_flash_forward(q, k, v, rule):
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, rule.causal, scale=rule.scale
    )


def _cpu_flash_backward(grad_out, q, k, v, out, lse, rule):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, rule.causal, scale=rule.scale
    )


def _cuda_flash_forward(q, k, v, rule):
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, rule.causal, False, scale=rule.scale
    )
    return out, lse


def _cuda_flash_backward(grad_out, q, k, v, out, lse, rule):
    # Random state is read only with dropout, cumulative lengths only for packed inputs.
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2],
        0.0, rule.causal, unused, unused, scale=rule.scale,
    )  # fmt: skip


def _cuda_efficient_forward(q, k, v, rule):
    group = q.shape[1] // k.shape[1]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, _repeat(k, group), _repeat(v, group), None, True, 0.0, rule.causal, scale=rule.scale
    )
    return out, lse[..., : q.shape[2]].contiguous()  # the kernel pads the rows to 32


def _cuda_efficient_backward(grad_out, q, k, v, out, lse, rule):
    group = q.shape[1] // k.shape[1]
    lse = pad(lse, (0, -q.shape[2] % 32), value=float("inf"))
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

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, n, s, d] -> [b, s, n, d]
    out, lse, *_ = forward(
        q, k, v, dropout_p=0.0, softmax_scale=rule.scale, causal=rule.causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _flash_attn_backward(grad_out, q, k, v, out, lse, rule):
    from flash_attn.flash_attn_interface import _flash_attn_backward as backward

    grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    backward(
        grad_out, q, k, v, out, lse.contiguous(), *grads, dropout_p=0.0, softmax_scale=rule.scale,
        causal=rule.causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
        alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    grad_q, grad_k, grad_v = (grad.transpose(1, 2) for grad in grads)
    return grad_q, grad_k, grad_v


CPU_FLASH = Kernel("torch CPU flash", _cpu_flash_forward, _cpu_flash_backward)
CUDA_FLASH = Kernel("torch CUDA flash", _cuda_flash_forward, _cuda_flash_backward)
CUDA_EFFICIENT = Kernel("torch CUDA efficient", _cuda_efficient_forward, _cuda_efficient_backward)
FLASH_ATTN = Kernel("FlashAttention package", _flash_attn_forward, _flash_attn_backward)
TILED = Kernel("tiled torch operations", tiled_forward, tiled_backward)
