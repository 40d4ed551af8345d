"""What waits in host memory: its values, and that nothing of it is left on the device."""

from __future__ import annotations

from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from megatron_paradyse.live_bytes import make_meter
from megatron_paradyse.strategies import host
from megatron_paradyse.strategies.host import copy_to_host, kept_on_host, piece_sizes, to_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class _Product(Function):
    """x w, keeping both."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, grad * x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_copy_comes_back_bit_by_bit(dtype):
    x = torch.randn(6, 4, device=DEVICE).to(dtype)[::2]  # not contiguous
    copy = copy_to_host(x)
    copy.finish()
    truth = x.clone()
    x.zero_()
    back = copy.back()
    assert back.dtype == dtype and back.device == x.device and torch.equal(back, truth)
    assert back.data_ptr() != copy.back().data_ptr()


def test_what_the_host_computed_goes_to_the_device_as_a_copy():
    values = np.arange(3)
    tensor = to_device(values, torch.device(DEVICE))
    tensor += 1
    assert tensor.tolist() == [1, 2, 3] and values.tolist() == [0, 1, 2]


def test_to_a_gpu_it_goes_from_pinned_memory_and_nobody_waits(monkeypatch):
    pinned = MagicMock()
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned)
    device = torch.device("cuda")
    assert to_device(np.arange(3), device) is pinned.to.return_value
    pinned.to.assert_called_once_with(device, non_blocking=True, copy=True)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000, 4096, (5 << 30) + 3])
def test_pieces_are_powers_of_two_but_for_a_small_last_one(length):
    """PyTorch's pool of pinned memory rounds each up to a power of two."""
    sizes = piece_sizes(length, 8)
    assert sum(sizes) == length and sizes == sorted(sizes, reverse=True)
    assert all(size & (size - 1) == 0 for size in sizes[:-1]) and 0 not in sizes
    assert not sizes or sizes[-1] < 8 or sizes[-1] & (sizes[-1] - 1) == 0


@pytest.mark.parametrize("shape", [(37, 5), (64, 4)])
def test_pinned_pieces_hold_all_of_the_tensor(shape, monkeypatch):
    """The copy of a GPU with streams that do nothing and memory that is not pinned.

    Copies begin after the kernels before them, and what runs after finish() waits for them.
    """
    empty, copy, calls = torch.empty, Tensor.copy_, MagicMock()
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **o: empty(*size, **o))
    monkeypatch.setattr(Tensor, "copy_", lambda *given, **o: (calls.copy(), copy(*given, **o))[1])
    monkeypatch.setattr(torch.cuda, "stream", calls.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: calls.kernels)
    monkeypatch.setattr(host, "_copy_stream", lambda device: calls.copies)
    monkeypatch.setattr(host, "SMALLEST_PIECE", 32)
    x = torch.randn(2 * shape[0], shape[1])[::2]  # not contiguous
    truth, waiting = x.clone(), host.PinnedCopy(x)
    waiting.finish()
    x.zero_()
    back = waiting.back()
    assert torch.equal(back, truth) and back.is_contiguous()
    names = [name for name, *_ in calls.mock_calls]
    copies = ["copy"] * (names.count("copy") // 2)
    used = ["use", "use().__enter__", *copies, "use().__exit__"]
    ended = ["copies.record_event", "kernels.wait_event"]
    assert names == ["copies.wait_stream", *used, *ended, *copies], names
    calls.copies.wait_stream.assert_called_once_with(calls.kernels)
    calls.use.assert_called_once_with(calls.copies)
    calls.kernels.wait_event.assert_called_once_with(calls.copies.record_event.return_value)


def test_the_input_leaves_the_device_and_returns_for_the_backward():
    """Live bytes after the forward are those of the result alone; gradients are the same."""
    parameter, w = (torch.randn(64, 64, device=DEVICE, requires_grad=True) for _ in range(2))
    meter = make_meter()
    gradients = []
    for offload in (False, True):
        with meter:
            before = meter.live_bytes
            x = parameter * 1
            if offload:
                with kept_on_host(x):
                    y = _Product.apply(x, w)
            else:
                y = _Product.apply(x, w)
            del x
            assert meter.live_bytes - before == (1 if offload else 2) * y.nbytes
            gradients.append(torch.autograd.grad(y.sum(), (parameter, w)))
            del y
            torch.cuda.synchronize() if DEVICE == "cuda" else None
    for kept, back in zip(*gradients, strict=True):
        assert torch.equal(kept, back)


def test_tensors_beside_the_input_are_saved_themselves():
    x, w = (torch.randn(4, device=DEVICE, requires_grad=True) for _ in range(2))
    with kept_on_host(x):
        y = _Product.apply(x, w)
    saved = y.grad_fn.saved_tensors
    assert saved[1] is w or saved[1].data_ptr() == w.data_ptr()
    assert saved[0].data_ptr() != x.data_ptr() and torch.equal(saved[0], x)


def test_the_transpose_of_a_square_input_is_not_taken_for_it():
    x, w = (torch.randn(4, 4, device=DEVICE, requires_grad=True) for _ in range(2))
    with kept_on_host(x):
        y = _Product.apply(x.t(), w)
    (grad,) = torch.autograd.grad(y.sum(), w)
    assert torch.equal(grad, x.t())


def test_a_weight_that_was_changed_in_place_is_noticed():
    x, w = (torch.randn(8, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    x = x * 1
    with kept_on_host(x):
        y = _Product.apply(x, w)
    x.detach().mul_(2)  # its copy is on the host
    torch.autograd.grad(y.sum(), w, retain_graph=True)
    with torch.no_grad():
        w.mul_(3)
    with pytest.raises(RuntimeError, match=r"shape \[8, 8\] .* was changed in place"):
        y.sum().backward()
