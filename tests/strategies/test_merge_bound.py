"""Merging by log-sum-exp keeps within the bound that docs/numerics.md derives."""

from __future__ import annotations

import pytest
import torch

from benchmarks.numerics import bound, merged_error
from megatron_paradyse.strategies.local_attention import merge_

ROWS, CHANNELS = 64, 8


@pytest.mark.parametrize("p", [1, 2, 3, 8, 64])
def test_attention_in_p_parts_is_within_the_bound_of_float64(p):
    error, largest_lse = merged_error(torch.float32, p, seed=1)
    assert 0 < error <= bound(p, largest_lse)


@pytest.mark.parametrize("p", [2, 8, 64])
@pytest.mark.parametrize("spread", [0.0, 3.0, 30.0], ids=["alike", "apart", "far apart"])
def test_the_merge_alone_is_within_the_bound(p, spread):
    """Of parts whose log-sum-exps are alike and far apart; exact parts, rounded to float32."""
    generator = torch.Generator().manual_seed(p)
    outs = torch.randn(p, ROWS, 1, 1, CHANNELS, generator=generator, dtype=torch.float64)
    lses = spread * torch.randn(p, 1, 1, ROWS, generator=generator, dtype=torch.float64)
    weights = torch.softmax(lses, 0).permute(0, 3, 1, 2)[..., None]  # [p, sq, b, n, 1]
    exact = (weights * outs).sum(0)
    out, lse = outs[0].float(), lses[0].float()
    for block_out, block_lse in zip(outs[1:].float(), lses[1:].float(), strict=True):
        merge_(out, lse, block_out.clone(), block_lse.clone())
    error = (out.double() - exact).abs().max() / outs.abs().max()
    largest_lse = float(max(lses.abs().max(), lse.abs().max()))
    assert error <= bound(p, largest_lse)
    assert (lse.double() - torch.logsumexp(lses, 0)).abs().max() <= p * (largest_lse + 2) * 2.0**-24


def test_the_bound_sees_a_merge_that_adds_exponentials_in_half_precision():
    """It is not so wide that anything would pass."""
    error, largest_lse = merged_error(torch.bfloat16, 8, seed=1)
    assert error > bound(8, largest_lse)
