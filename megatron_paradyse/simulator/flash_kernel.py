"""The attention kernels of a GPU, where a simulation runs one of a CPU.

FlashAttention's backward allocates beside its results, as its version 2 does in its own package and
in PyTorch: the gradient of q is summed in float32 with its rows rounded up to 128 and d to 32
(beyond 128: to 64), each row has the sum of out times its gradient, and with grouped heads each
head has gradients of k and v of its own. It takes a sliding window, of which its tiles of 128
queries compute the scores that one of them sees; and documents that lie side by side in one call,
whose backward has 128 rows more for each of them.

Dropout, and windows in float32, run fused_tiles.py. Its backward makes the scores and their
gradients twice, which is seven products instead of five, and holds a number per row. Its seconds
are those of FlashAttention's products, without the hash: no GPU has told them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from megatron_paradyse.doors import opened
from megatron_paradyse.strategies import local_attention
from megatron_paradyse.strategies.blocks import num_visible
from megatron_paradyse.strategies.fused_tiles import are_written_for, tile_of
from megatron_paradyse.strategies.kernels import CPU_FLASH, TILED, Kernel, runs_flash
from megatron_paradyse.strategies.sizes import DOCUMENT_ROWS, accumulated_head_dim
from megatron_paradyse.strategies.small_calls import in_small_calls
from megatron_paradyse.strategies.tiled_kernel import BlockRule

HALF_TYPES = (torch.bfloat16, torch.float16)
TILE_ROWS = 128
FUSED_PRODUCTS, FLASH_PRODUCTS = 7, 5  # of a backward
LEAST = (8, 0)  # compute capability: every device here has more


# of the number of scores that a kernel computes per head: as long as it does
Scores = Callable[[int], AbstractContextManager]


@contextlib.contextmanager
def flash_kernel(scores: Scores = lambda count: contextlib.nullcontext()) -> Iterator[None]:
    """The attention kernel of half types is FlashAttention's; of dropout, fused_tiles.py's."""
    choose = local_attention.choose_kernel
    flash = replace(_FLASH, for_documents=_counted(_DOCUMENTS, scores, _in_documents))
    windowed = replace(_counted(_FLASH, scores, _in_window), has_window=True)
    fused = _counted(_FUSED, scores, _in_tiles, _again_in_tiles)

    def chosen(q: Tensor, *, window: bool = False, dropout: bool = False) -> Kernel:
        kernel = choose(q, window=window, dropout=dropout)
        has_flash = q.dtype in HALF_TYPES and runs_flash(LEAST, q.dtype, q.shape[-1])
        if has_flash and not dropout:
            return windowed if window else flash
        fuses = kernel is TILED and not tiles_scores(q.dtype, q.shape[-1])
        return fused if fuses else kernel

    with opened([(local_attention, "choose_kernel", chosen)]):
        yield


def tiles_scores(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether dropout takes a kernel that holds tiles of scores; GPUs are taken to have Triton."""
    return not are_written_for(LEAST, dtype, head_dim)


def workspace(q: Tensor, k: Tensor, documents: int = 0) -> tuple[Tensor, ...]:
    """q [b, n, sq, d], k [b, g, sk, d] -> what the backward holds until its end.

    documents: that lie side by side in q; 0: q is one block.
    """
    b, n, rows, d = q.shape
    rows += documents * DOCUMENT_ROWS or -rows % TILE_ROWS
    wide = accumulated_head_dim(d)
    held = [
        q.new_empty((b, rows, n, wide), dtype=torch.float32),
        q.new_empty((b, n, rows), dtype=torch.float32),
    ]
    if k.shape[1] != n:
        held += [k.new_empty((b, k.shape[2], n, d)) for _ in range(2)]
    return tuple(held)


def _backward(grad_out, q, k, v, out, lse, rule):
    held = workspace(q, k, len(rule.parts))
    grads = CPU_FLASH.backward(grad_out, q, k, v, out, lse, rule)
    del held
    return grads


_FLASH = replace(CPU_FLASH, name="FlashAttention, simulated", backward=in_small_calls(_backward))


_DOCUMENTS = replace(_FLASH, backward=_backward)


def _fused_backward(grad_out, q, k, v, out, lse, rule):
    held = q.new_empty(q.shape[:3], dtype=torch.float32)
    grads = CPU_FLASH.backward(grad_out, q, k, v, out, lse, rule)
    del held
    return grads


_FUSED = Kernel("fused tiles, simulated", CPU_FLASH.forward, _fused_backward, has_window=True)

# of queries, keys and a rule: the scores that a call computes per head
Count = Callable[[Tensor, Tensor, BlockRule], int]


def _counted(
    kernel: Kernel, scores: Scores, count: Count, backward_count: Count | None = None
) -> Kernel:
    """The kernel, told how many scores it computes; backward_count: if its backward has others."""

    def forward(q, k, v, rule):
        with scores(count(q, k, rule)):
            return kernel.forward(q, k, v, rule)

    def backward(grad_out, q, k, v, out, lse, rule):
        with scores((backward_count or count)(q, k, rule)):
            return kernel.backward(grad_out, q, k, v, out, lse, rule)

    return replace(kernel, forward=forward, backward=backward)


def _in_documents(_q: Tensor, _k: Tensor, rule: BlockRule) -> int:
    """Causal: of queries that are the keys' own rows."""
    return sum(q * (q + 1) // 2 if rule.causal else q * k for q, k in rule.parts)


def _in_window(q: Tensor, k: Tensor, rule: BlockRule, tile_rows: int = TILE_ROWS) -> int:
    window = None if rule.window is None else rule.window + tile_rows - 1
    ahead = rule.q_start - rule.k_start
    return num_visible(q.shape[2], k.shape[2], ahead=ahead, causal=rule.causal, window=window)


def _in_tiles(q: Tensor, k: Tensor, rule: BlockRule) -> int:
    return _in_window(q, k, rule, tile_of(q)["ROWS"])


def _again_in_tiles(q: Tensor, k: Tensor, rule: BlockRule) -> int:
    return _in_tiles(q, k, rule) * FUSED_PRODUCTS // FLASH_PRODUCTS
