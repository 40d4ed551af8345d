"""The tiled head's weight gradient reaches Megatron's DDP as its own fused linear's does."""

from __future__ import annotations

import pytest
import torch

from megatron_paradyse.edges.cross_entropy import tiled_cross_entropy
from megatron_paradyse.model_edges import _take_weight_gradient
from tests.fused_linear import FusedLinear, parameter_under_ddp
from tests.strategies.harness import run_ranks

S, H, V = 12, 4, 3  # the parameter is [v, h]


def _microbatch(group, weight, kind: str, tied: bool) -> torch.Tensor:
    """Add a microbatch's gradient to the weight; returns what it should be. f: fused, t: tiles."""
    x = torch.randn(S, 1, H, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(V, (1, S))
    hidden = x + torch.nn.functional.embedding(labels.t(), weight) if tied else x * 1.0
    if kind == "f":
        logits = FusedLinear.apply(hidden.flatten(0, 1), weight, False)
        loss = torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum")
    else:
        loss = tiled_cross_entropy(
            hidden, weight, labels, group, tile=5, token_weights=torch.ones(1, S),
            take_weight_gradient=lambda grad: _take_weight_gradient(weight, grad, fused=True),
        ).sum()  # fmt: skip
    plain = weight.detach().clone().requires_grad_()
    plain_hidden = x.detach() + (torch.nn.functional.embedding(labels.t(), plain) if tied else 0)
    plain_logits = plain_hidden.flatten(0, 1) @ plain.t()
    true = torch.nn.functional.cross_entropy(plain_logits, labels[0], reduction="sum")
    loss.backward()
    return torch.autograd.grad(true, plain)[0]


def _accumulate(group, case):
    order, tied = case
    torch.manual_seed(0)
    weight = parameter_under_ddp()
    weight.zero_out_wgrad = tied
    expected = torch.zeros_like(weight)
    for kind in order:
        expected += _microbatch(group, weight, kind, tied)
        assert weight.grad is None  # the hook took it
    return weight.main_grad, expected


CASES = {
    "tiles": ("t", False),
    "tiles after tiles": ("tt", False),
    "tied": ("tt", True),
    "tiles and Megatron's own head in turn": ("tftf", False),
}


def test_gradients_of_microbatches_add_up_in_main_grad():
    for name, [(mine, true)] in run_ranks(1, _accumulate, CASES).items():
        torch.testing.assert_close(mine, true, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("tied", [False, True])
def test_the_dummy_gradient_is_zero_where_an_embedding_adds_its_own(tied):
    weight = parameter_under_ddp()
    weight.zero_out_wgrad = tied
    dummy = _take_weight_gradient(weight, torch.ones_like(weight), fused=True)
    assert dummy.shape == weight.shape and weight.grad_added_to_main_grad
    assert (weight.main_grad == 1).all()
    if tied:
        assert (dummy == 0).all()


def test_without_fusion_the_gradient_goes_through_autograd_in_the_weights_dtype():
    weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    grad = _take_weight_gradient(weight, torch.full((2, 3), 0.3), fused=False)
    assert grad.dtype == torch.bfloat16 and (grad == torch.tensor(0.3).bfloat16()).all()
