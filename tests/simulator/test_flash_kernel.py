"""In a simulation attention holds and computes what FlashAttention does on a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.simulator.flash_kernel import flash_kernel, tiles_scores, workspace
from megatron_paradyse.simulator.hardware import find_device
from megatron_paradyse.simulator.simulated_device import SimulatedDevice
from megatron_paradyse.strategies import local_attention as local_attention_module
from megatron_paradyse.strategies import small_calls
from megatron_paradyse.strategies.blocks import balanced_spans, contiguous_spans, whole
from megatron_paradyse.strategies.contract import AttentionShape, Microbatch
from megatron_paradyse.strategies.kernels import CPU_FLASH, TILED
from megatron_paradyse.strategies.local_attention import AttentionTask, local_attention
from megatron_paradyse.strategies.tiled_kernel import BlockRule

S, B, N, D = 1000, 2, 4, 48  # rounded up: 1024 rows, 64 elements
ACCUMULATOR, DELTA = B * 1024 * N * 64 * 4, B * 1024 * N * 4


@pytest.mark.parametrize(("g", "expanded"), [(4, 0), (2, 2 * B * S * N * D * 2)])
def test_the_workspace_is_what_its_sources_allocate(g, expanded):
    q, k = (torch.empty(B, heads, S, D, dtype=torch.bfloat16) for heads in (N, g))
    assert sum(x.nbytes for x in workspace(q, k)) == ACCUMULATOR + DELTA + expanded
    wide = torch.empty(1, 1, 128, 136, dtype=torch.bfloat16)
    assert workspace(wide, wide)[0].shape == (1, 128, 1, 192)


def test_of_documents_it_has_rows_more_for_each():
    """As total rows and 128 for each of their number, in the sources; not rounded up."""
    q, k = (torch.empty(1, heads, S, D, dtype=torch.bfloat16) for heads in (N, N))
    assert sum(x.nbytes for x in workspace(q, k, 7)) == (S + 7 * 128) * N * (64 + 1) * 4


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(128, 100, 20), (250, 2, 2, 2)])
def test_documents_side_by_side_are_one_call_that_computes_their_own_scores(lengths, causal):
    counted = []

    @contextlib.contextmanager
    def scores(count):
        counted.append(count)
        yield

    shape = AttentionShape(N, 2, D, causal=causal, softmax_scale=0.1)
    microbatch = microbatch_of(contiguous(lengths, 1, alignment=256))
    task = AttentionTask(shape, microbatch)
    with FakeTensorMode(), flash_kernel(scores):
        q, k = (
            torch.empty(256, 1, heads, D, dtype=torch.bfloat16, requires_grad=True)
            for heads in (N, 2)
        )
        out = local_attention(q, k, k, spans=contiguous_spans(microbatch, 1, 0), task=task)
        out.backward(torch.empty_like(out))
    assert counted == 2 * [sum(n * (n + 1) // 2 if causal else n * n for n in lengths)]


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
    plain, simulated = _backward_bytes(dtype), _backward_bytes(dtype, flash_kernel)
    gradients = 3 * S * B * N * D * dtype.itemsize if pieces > 1 else 0
    assert simulated - plain == more + gradients // pieces


@pytest.mark.parametrize("spans_of", [contiguous_spans, balanced_spans])
@pytest.mark.parametrize("window", [1, 37, 130, 5000])
def test_of_a_window_tiles_compute_the_scores_that_one_of_their_queries_sees(spans_of, window):
    """In each pass: in the blocks, those of the window and of the 127 rows before it."""
    p, s = 4, 512
    shape = AttentionShape(2, 2, 16, causal=True, softmax_scale=0.1, window=window)
    microbatch = Microbatch(s, 1)
    task = AttentionTask(shape, microbatch)
    counted, expected, kernels = [], [], set()

    @contextlib.contextmanager
    def scores(count):
        counted.append(count)
        yield

    with FakeTensorMode(), flash_kernel(scores):
        for q_rank, k_rank in itertools.product(range(p), repeat=2):
            q, k, v, grad = (torch.empty(1, 2, s // p, 16, dtype=torch.bfloat16) for _ in range(4))
            spans = [spans_of(microbatch, p, rank) for rank in (q_rank, k_rank)]
            for block in task.blocks(*spans):
                kernel, rule = task.kernel(q, block), task.rule(block)
                kernels.add(kernel.name)
                rows, keys = slice(*block.q_rows), slice(*block.k_rows)
                parts = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
                out, lse = kernel.forward(*parts, rule)
                kernel.backward(grad[:, :, rows], *parts, out, lse, rule)
                if block.window is not None:
                    of_q = range(block.q_start, block.q_start + rows.stop - rows.start)
                    of_k = range(block.k_start, block.k_start + keys.stop - keys.start)
                    near = [q - k for q, k in itertools.product(of_q, of_k) if q - k < window + 127]
                    seen = sum(distance >= 0 or not block.causal for distance in near)
                    expected += [seen, seen]
    assert kernels == {"FlashAttention, simulated"}
    assert counted == expected and (any(expected) or window > s)


def test_attention_takes_as_long_as_the_scores_that_it_computes():
    at_once = replace(find_device("a100-80g"), host_seconds_per_kernel=0.0)
    device = SimulatedDevice(at_once)
    with FakeTensorMode(), device:
        q, k, v = (torch.empty(1, 8, 8192, 128, dtype=torch.bfloat16) for _ in range(3))
        seconds = []
        for count in (8192 * 8192, 8192 * 2048):
            device.clock.restart()
            with device.scores(count):
                CPU_FLASH.forward(q, k, v, BlockRule(scale=0.1))
            seconds.append(device.clock.reading())
    assert seconds[0] == pytest.approx(4 * seconds[1], rel=0.05)


def test_float32_dropout_and_wide_heads_run_what_a_gpu_runs_of_them():
    with FakeTensorMode(), flash_kernel():
        for dtype, head_dim, options, name in (
            (torch.float32, 16, {"window": True}, "fused tiles, simulated"),
            (torch.bfloat16, 16, {"window": True, "dropout": True}, "fused tiles, simulated"),
            (torch.float32, 16, {}, CPU_FLASH.name),
            (torch.bfloat16, 256, {}, "FlashAttention, simulated"),
            (torch.bfloat16, 264, {}, CPU_FLASH.name),
            (torch.bfloat16, 264, {"dropout": True}, TILED.name),
            (torch.float64, 16, {"dropout": True}, TILED.name),
        ):
            q = torch.empty(1, 1, 8, head_dim, dtype=dtype)
            assert local_attention_module.choose_kernel(q, **options).name == name


@pytest.mark.parametrize(("window", "scores"), [(None, 128 * 129 // 2), (40, None)])
def test_with_dropout_a_backward_makes_its_scores_twice_and_holds_a_sum_of_each_row(window, scores):
    """Seven products, not five; of a window each tile of 64 queries the keys that one sees."""
    if scores is None:
        near = itertools.product(range(128), repeat=2)
        scores = sum(0 <= q - k < window + 63 for q, k in near)
    counted = []

    @contextlib.contextmanager
    def told(count):
        counted.append(count)
        yield

    rule = BlockRule(scale=0.1, causal=True, window=window, dropout=0.1)
    with FakeTensorMode(), flash_kernel(told), LiveBytes() as meter:
        q, k, v, grad = (torch.empty(2, 4, 128, 16, dtype=torch.bfloat16) for _ in range(4))
        kernel = local_attention_module.choose_kernel(q, dropout=True)
        out, lse = kernel.forward(q, k, v, rule)
        before = meter.live_bytes
        meter.reset_peak()
        grads = kernel.backward(grad, q, k, v, out, lse, rule)
        assert meter.peak_bytes - before == sum(x.nbytes for x in grads) + 2 * 4 * 128 * 4
    assert counted == [scores, scores * 7 // 5]


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


def test_a_simulated_gpu_has_triton_where_this_machine_has_none(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not tiles_scores(torch.bfloat16, 80) and not tiles_scores(torch.float32, 256)
    assert tiles_scores(torch.float64, 64) and tiles_scores(torch.bfloat16, 264)
