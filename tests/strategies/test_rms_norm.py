"""The RMSNorm against PyTorch's in float64, and what it keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.strategies import sizes
from megatron_paradyse.strategies.rms_norm import RmsNorm
from megatron_paradyse.train import plugin

H = 96


def gradients(norm, x, grad):
    x = x.clone().requires_grad_()
    y = norm(x)
    return y, *torch.autograd.grad(y, (x, norm.weight), grad.to(y.dtype))


def norm_of(kind, weight, dtype):
    norm = kind(H, eps=1e-5).to(dtype)
    norm.weight.data.copy_(weight)
    return norm


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("tile_rows", [1, 7, 1000])
def test_equals_the_formula_in_float64(dtype, bound, tile_rows, monkeypatch):
    monkeypatch.setattr(sizes, "NORM_TILE_ELEMENTS", tile_rows * H)
    torch.manual_seed(0)
    x, grad = (torch.randn(30, 2, H, dtype=torch.float64).to(dtype).double() for _ in range(2))
    weight = (torch.rand(H, dtype=torch.float64) + 0.5).to(dtype).double()
    exact = norm_of(torch.nn.RMSNorm, weight, torch.float64)
    expected = gradients(exact, x, grad)
    found = gradients(norm_of(RmsNorm, weight, dtype), x.to(dtype), grad)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_pytorchs_to_the_bit(dtype):
    x = torch.randn(50, H).to(dtype)
    weight = torch.rand(H).to(dtype)
    assert torch.equal(
        norm_of(RmsNorm, weight, dtype)(x), norm_of(torch.nn.RMSNorm, weight, dtype)(x)
    )


def test_keeps_one_number_a_row_beside_its_input_and_result():
    x = torch.randn(1000, 1, 256, dtype=torch.bfloat16, requires_grad=True)
    norm = RmsNorm(256, eps=1e-5).to(torch.bfloat16)
    with LiveBytes([x, norm.weight]) as meter:
        before = meter.live_bytes
        y = norm(x)
        assert meter.live_bytes - before == y.nbytes + 1000 * 4


@pytest.mark.parametrize(
    ("builder", "normalization", "ours"),
    [
        ("WrappedTorchNorm", "RMSNorm", True),
        ("WrappedTorchNorm", "LayerNorm", True),
        ("FusedLayerNorm", "RMSNorm", True),
        ("FusedLayerNorm", "LayerNorm", False),
        ("another", "RMSNorm", False),
    ],
)
def test_a_norm_that_megatron_cannot_build_is_ours(builder, normalization, ours):
    """With apex and without TransformerEngine Megatron takes apex's, which has no RMSNorm."""
    plugin.install()
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_paradyse.core_attention import TorchNorm
    from megatron_paradyse.layer_specs import norm_for

    builders = {"WrappedTorchNorm": WrappedTorchNorm, "FusedLayerNorm": FusedLayerNorm}
    given = builders.get(builder, object)
    found = norm_for(given, SimpleNamespace(normalization=normalization))
    assert found is (TorchNorm if ours else given)
