"""One attention over pieces of keys, with a kernel of choice, from external out and lse."""

from __future__ import annotations

import itertools
import math
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_paradyse.packing.row import Row
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.strategies import local_attention
from megatron_paradyse.strategies.blocks import Span, contiguous_spans
from megatron_paradyse.strategies.contract import AttentionShape, Microbatch
from megatron_paradyse.strategies.kernels import Kernel
from megatron_paradyse.strategies.local_attention import (
    AttentionTask,
    PartialOutput,
    add_gradients_,
    new_gradients,
)

CUTS = (0, 44, 100)
HEADS = ((4, 4), (4, 2), (4, 1))
MASKS = {"bidirectional": None, "causal": None, "window 1": 1, "window 9": 9, "window 70": 70}


def attend_in_pieces(
    kernel: Kernel | None,
    *,
    mask: str,
    n: int,
    g: int,
    d: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> tuple[Tensor, ...]:
    """Output and gradients of q, k and v; with a kernel, every block runs it.

    Two sequences side by side in [s, b, heads, d], so that no tensor is contiguous heads first.
    The backward of each piece gets the output and lse of all.
    """
    s, b, random = CUTS[-1], 2, torch.Generator().manual_seed(n + g)
    q, k, v, grad = (
        torch.randn(s, b, heads, d, dtype=torch.float64, generator=random).to(device, dtype)
        for heads in (n, g, g, n)
    )
    shape = AttentionShape(
        num_heads=n, num_kv_heads=g, head_dim=d, causal=mask != "bidirectional",
        softmax_scale=1 / math.sqrt(d), window=MASKS[mask],
    )  # fmt: skip
    task = AttentionTask(shape, Microbatch(s, b))
    pieces = tuple(Span(a, a, z) for a, z in itertools.pairwise(CUTS))
    choose = local_attention.choose_kernel
    with patch.object(
        local_attention, "choose_kernel", choose if kernel is None else lambda *a, **o: kernel
    ):
        partial = PartialOutput(q)
        for piece in pieces:
            partial.add(k, v, q_spans=pieces, k_spans=(piece,), task=task)
        out, lse = partial.result()
        grads = new_gradients(q, k, v)
        for piece in pieces:
            add_gradients_(
                grads, grad, q, k, v, out, lse, q_spans=pieces, k_spans=(piece,), task=task
            )
    return out, *grads


def attend_in_row(kernel: Kernel, row: Row, *, causal: bool) -> tuple[Tensor, ...]:
    """As attend_in_pieces, in float64: a row of documents on one rank, keys as they lie."""
    n, g, d, random = 4, 2, 8, torch.Generator().manual_seed(5)
    microbatch = microbatch_of(row)
    q, k, v, grad = (
        torch.randn(row.seq_length, 1, heads, d, dtype=torch.float64, generator=random)
        for heads in (n, g, g, n)
    )
    shape = AttentionShape(n, g, d, causal, softmax_scale=1 / math.sqrt(d))
    task, spans = AttentionTask(shape, microbatch), contiguous_spans(microbatch, 1, 0)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    with patch.object(local_attention, "choose_kernel", lambda *a, **o: kernel):
        out = local_attention.local_attention(*inputs, spans=spans, task=task)
        return out.detach(), *torch.autograd.grad(out, inputs, grad)
