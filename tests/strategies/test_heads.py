"""The query/key norms over many rows."""

from __future__ import annotations

import pytest
import torch

from megatron_paradyse.strategies.contract import AttentionShape
from megatron_paradyse.strategies.heads import head_norm


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
