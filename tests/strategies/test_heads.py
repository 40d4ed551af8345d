"""The query/key norms over many rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_paradyse.simulator.hardware import find_device
from megatron_paradyse.simulator.simulated_device import SimulatedDevice, fused_functions
from megatron_paradyse.strategies.contract import AttentionShape
from megatron_paradyse.strategies.heads import head_norm
from megatron_paradyse.strategies.memory import measure


def _gradients(norm: str, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    rows, weight, bias, grad = (
        torch.randn(*size, generator=random).bfloat16().to(dtype).requires_grad_()
        for size in ((10000, 16), (16,), (16,), (10000, 16))
    )
    shape = AttentionShape(1, 1, 16, causal=True, softmax_scale=1.0, qk_norm=norm)
    head_norm(rows, weight, bias, shape).backward(grad.detach() + 1)
    return [t.grad for t in (weight, bias) if t.grad is not None]


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_weight_gradients_over_many_rows_are_not_summed_in_bfloat16(norm):
    """Rounding the sum once costs 2^-9; adding 10000 rows up in bfloat16 would lose most of it."""
    pairs = zip(_gradients(norm, torch.bfloat16), _gradients(norm, torch.float64), strict=True)
    for got, truth in pairs:
        assert (got.double() - truth).norm() <= 2**-8 * truth.norm()


def _kept(norm: str, *, plus_one: bool) -> int:
    """Bytes beside the input, of 100 rows of 8 heads of 16 channels in a half type."""
    shape = AttentionShape(8, 8, 16, causal=True, softmax_scale=1.0, qk_norm=norm)
    shape = replace(shape, qk_norm_plus_one=plus_one)
    x = torch.randn(100, 1, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    weights = [None] if norm == "l2" else [torch.ones(16, dtype=torch.bfloat16, requires_grad=True)]
    weights += [weights[0] if norm == "layernorm" else None]
    parameters = [t for t in {id(t): t for t in weights}.values() if t is not None]
    found = measure(lambda: head_norm(x, *weights, shape), x, parameters, torch.ones_like(x))
    return found.kept_bytes - x.nbytes


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "l2"])
def test_a_norm_keeps_numbers_of_each_head_beside_its_input(norm, plus_one):
    """A LayerNorm in a half type a copy of it on a CPU, and not where a GPU is simulated."""
    heads, width = 800, 16
    copies = 4 * heads * width - 2 * heads * width if norm == "layernorm" else 0
    weights = 3 * 4 * width  # in float32
    least = copies + 4 * heads
    assert least <= _kept(norm, plus_one=plus_one) <= least + 4 * heads + weights
    device = SimulatedDevice(find_device("a100-80g"))
    with fused_functions(device):
        kept = _kept(norm, plus_one=plus_one)
    assert 4 * heads <= kept <= 8 * heads + weights
