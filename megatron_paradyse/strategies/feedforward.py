"""The elementwise middle of an MLP, GELU or gated, and its gradient by recomputation."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_paradyse.strategies.contract import MlpShape


def activate(y: Tensor, shape: MlpShape, *, num_shards: int = 1) -> Tensor:
    """fc1's output [..., f], or gated [..., 2f] -> fc2's input [..., f].

    Gated features lie shard by shard, each its gate features, then its up features; the result
    has the features of all shards in the order of fc2's columns.
    """
    if not shape.gated:
        return shape.activation(y)
    gate, up = y.unflatten(-1, (num_shards, 2, -1)).unbind(-2)
    return (shape.activation(gate) * up).flatten(-2)


def activation_gradient(y: Tensor, grad: Tensor, shape: MlpShape, *, num_shards: int = 1) -> Tensor:
    """The gradient of y, given that of activate(y): runs the activation again."""
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        return torch.autograd.grad(activate(y, shape, num_shards=num_shards), y, grad)[0]
