"""A gate on each channel of the attention's output, before proj.

Megatron's --attention-output-gate: beside each query head, linear_qkv makes a gate of as many
channels, linear in the layer's input, neither normalised nor rotated, and

    out' = sigmoid(gate) out

elementwise, in the accumulation dtype, rounded once. From "Gated Attention for Large Language
Models: Non-linearity, Sparsity, and Attention-Sink-Free" (Qiu et al., 2025): the gate after the
attention, elementwise, of each head its own.

A gate is needed where its query's output is: it is never communicated but as rows of linear_qkv.

Layouts: out, gate and gradients [s, b, n, d], of any part of s and n; out and its gradient may have
the heads in several dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_paradyse.strategies.local_attention import accumulation_dtype
from megatron_paradyse.strategies.sizes import positions_of_tile


def with_gate(out: Tensor, gate: Tensor | None) -> Tensor:
    """out', contiguous; without a gate out itself. Keeps out, which attention keeps too, and gate.

    Of a sequence longer than a tile, in tiles: so many sigmoids are there at once.
    """
    return out if gate is None else _Gated.apply(out, gate.view(out.shape))


class _Gated(Function):
    @staticmethod
    def forward(ctx, out, gate):
        ctx.save_for_backward(out, gate)
        result = torch.empty_like(gate)
        for of_result, of_out, of_gate in _tiles(result, out, gate):
            torch.mul(of_out, _sigmoid(of_gate), out=of_result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return gate_gradients(grad, *ctx.saved_tensors)


def gate_gradients(grad: Tensor, out: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Of out and of gate, given that of out'."""
    grad_out, grad_gate = torch.empty_like(out), torch.empty_like(gate)
    for of_grad, of_out, of_gate, to_out, to_gate in _tiles(grad, out, gate, grad_out, grad_gate):
        factor = _sigmoid(of_gate)
        torch.mul(of_grad, factor, out=to_out)
        factor.addcmul_(factor, factor, value=-1)  # the sigmoid's slope, y - y^2
        torch.mul(factor.mul_(of_grad), of_out, out=to_gate)
        del factor
    return grad_out, grad_gate


def _sigmoid(gate: Tensor) -> Tensor:
    """A new tensor of the accumulation dtype."""
    return gate.to(accumulation_dtype(gate.dtype), copy=True).sigmoid_()


def _tiles(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    positions = positions_of_tile(tensors[0].shape[1])
    return zip(*(tensor.split(positions) for tensor in tensors), strict=True)
