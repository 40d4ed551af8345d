"""Gradients of gradients, which no strategy has: refused, never incomplete."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron_paradyse.strategies import strategy_names
from tests.strategies.cases import AttentionCase, MlpCase
from tests.strategies.harness import run_ranks
from tests.strategies.layers import rank_layer

CASES = {
    case.name: case
    for name in strategy_names()
    for suffix in ("", "+recompute")
    for case in (AttentionCase(name + suffix, 2), MlpCase(name + suffix, 2))
}


def _second_order(group, case) -> str:
    """What PyTorch says of the gradient of a gradient."""
    layer = rank_layer(group, case)
    x = layer.x.detach().requires_grad_()
    output = layer.run(x, layer.weights)
    (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    try:
        grad.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "none"


@functools.cache
def _found() -> dict[str, list[str]]:
    return run_ranks(2, _second_order, CASES)


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_of_a_gradient_is_refused(case):
    assert all("once_differentiable" in said for said in _found()[case]), _found()[case]
