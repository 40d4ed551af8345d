"""What waits in host memory: its values, and that nothing of it is left on the device."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

from megatron_paradyse.live_bytes import make_meter
from megatron_paradyse.strategies.host import copy_to_host, kept_on_host

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
