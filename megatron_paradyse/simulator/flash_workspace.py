"""What FlashAttention's backward allocates on a GPU beside its results: no kernel of a CPU does.

As its version 2 does, in its own package and in PyTorch: the gradient of q is summed in float32
with its rows rounded up to 128 and d to 32 (beyond 128: to 64), each row has the sum of out times
its gradient, and with grouped heads each head has gradients of k and v of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron_paradyse.simulator.doors import opened
from megatron_paradyse.strategies import local_attention
from megatron_paradyse.strategies.kernels import CPU_FLASH, Kernel
from megatron_paradyse.strategies.small_calls import in_small_calls

HALF_TYPES = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def flash_workspace() -> Iterator[None]:
    """The attention kernel of half types holds inside what FlashAttention would."""
    choose = local_attention.choose_kernel

    def chosen(q: Tensor, **options) -> Kernel:
        kernel = choose(q, **options)
        return _FLASH if kernel is CPU_FLASH and q.dtype in HALF_TYPES else kernel

    with opened([(local_attention, "choose_kernel", chosen)]):
        yield


def workspace(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """q [b, n, sq, d], k [b, g, sk, d] -> what the backward holds until its end."""
    b, n, rows, d = q.shape
    rows += -rows % 128
    wide = d + -d % (32 if d <= 128 else 64)
    held = [
        q.new_empty((b, rows, n, wide), dtype=torch.float32),
        q.new_empty((b, n, rows), dtype=torch.float32),
    ]
    if k.shape[1] != n:
        held += [k.new_empty((b, k.shape[2], n, d)) for _ in range(2)]
    return tuple(held)


def _backward(grad_out, q, k, v, out, lse, rule):
    held = workspace(q, k)
    grads = CPU_FLASH.backward(grad_out, q, k, v, out, lse, rule)
    del held
    return grads


_FLASH = replace(CPU_FLASH, name="FlashAttention, simulated", backward=in_small_calls(_backward))
