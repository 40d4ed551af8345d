"""The bytes that FlashAttention's backward needs on a GPU are counted in a simulation."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.simulator.flash_workspace import flash_workspace, workspace
from megatron_paradyse.strategies import small_calls
from megatron_paradyse.strategies.blocks import whole
from megatron_paradyse.strategies.contract import AttentionShape, Microbatch
from megatron_paradyse.strategies.local_attention import AttentionTask, local_attention

S, B, N, D = 1000, 2, 4, 48  # rounded up: 1024 rows, 64 elements
ACCUMULATOR, DELTA = B * 1024 * N * 64 * 4, B * 1024 * N * 4


@pytest.mark.parametrize(("g", "expanded"), [(4, 0), (2, 2 * B * S * N * D * 2)])
def test_the_workspace_is_what_its_sources_allocate(g, expanded):
    q, k = (torch.empty(B, heads, S, D, dtype=torch.bfloat16) for heads in (N, g))
    assert sum(x.nbytes for x in workspace(q, k)) == ACCUMULATOR + DELTA + expanded
    wide = torch.empty(1, 1, 128, 136, dtype=torch.bfloat16)
    assert workspace(wide, wide)[0].shape == (1, 128, 1, 192)


@pytest.mark.parametrize(
    ("dtype", "pieces", "more"),
    [
        (torch.bfloat16, 1, ACCUMULATOR + DELTA),
        (torch.bfloat16, 4, (ACCUMULATOR + DELTA) // 4),  # and the gradients of a piece
        (torch.float32, 1, 0),
    ],
)
def test_a_simulated_backward_holds_it(dtype, pieces, more, monkeypatch):
    """In pieces beside the gradients of all: each sequence's two halves of the heads."""
    monkeypatch.setattr(small_calls, "MOST_ELEMENTS", B * 1024 * N * 64 // pieces)
    plain, simulated = _backward_bytes(dtype), _backward_bytes(dtype, flash_workspace)
    gradients = 3 * S * B * N * D * dtype.itemsize if pieces > 1 else 0
    assert simulated - plain == more + gradients // pieces


def _backward_bytes(dtype, context=None) -> int:
    """The peak of an attention's backward above what was there before it."""
    shape = AttentionShape(N, N, D, causal=True, softmax_scale=0.1)
    task = AttentionTask(shape, Microbatch(S, B))
    with FakeTensorMode(), LiveBytes() as meter:
        q, k, v = (torch.empty(S, B, N, D, dtype=dtype, requires_grad=True) for _ in range(3))
        if context is None:
            out = local_attention(q, k, v, spans=whole(task.microbatch), task=task)
            return _peak(meter, out, (q, k, v))
        with context():
            out = local_attention(q, k, v, spans=whole(task.microbatch), task=task)
            return _peak(meter, out, (q, k, v))


def _peak(meter: LiveBytes, out, tensors) -> int:
    grad = torch.empty_like(out)
    before = meter.live_bytes
    meter.reset_peak()
    grads = torch.autograd.grad(out, tensors, grad)
    del grads
    return meter.peak_bytes - before
