"""An RMSNorm that keeps its input and one number per row, as PyTorch's own does on a GPU only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megatron_paradyse.strategies import sizes


class RmsNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm over the last dimension, with the memory of one fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., h], weight [h] or none -> [..., h], computed in float32 at least.

    On a GPU PyTorch's kernel runs. Elsewhere F.rms_norm is made of many operations that keep
    float32 copies of the input; here they run in tiles of rows, and again in the backward. There
    the weight may be wider than x.
    """
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return _InTiles.apply(x, weight, eps)


class _InTiles(Function):
    """x [..., h], weight [h] -> [..., h]; keeps x and the inverse root mean square [..., 1]."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        weights = None if weight is None else weight.detach()
        y, scale = normalise(x.detach(), weights, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *normalise_backward(grad, *ctx.saved_tensors), None


def normalise(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x [..., h] -> y [..., h] and 1 / sqrt(mean(x^2) + eps) [..., 1], at least float32."""
    wide = _wide(x)
    y, scale = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=wide)
    for tile in tiles(x):
        part = x[tile].to(wide)
        torch.rsqrt(part.square().mean(-1, keepdim=True) + eps, out=scale[tile])
        part = part * scale[tile]
        y[tile] = part if weight is None else part * weight
    return y, scale


def normalise_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x [..., h] and of weight [h]."""
    wide = _wide(x)
    grad_x = torch.empty_like(x)
    grad_weight = None if weight is None else torch.zeros_like(weight, dtype=wide)
    for tile in tiles(x):
        hat = x[tile].to(wide) * scale[tile]  # normalised
        part = grad[tile].to(wide)
        if weight is not None and grad_weight is not None:
            grad_weight += (part * hat).reshape(-1, x.shape[-1]).sum(0)
            part = part * weight
        grad_x[tile] = scale[tile] * (part - hat * (part * hat).mean(-1, keepdim=True))
    if weight is None or grad_weight is None:
        return grad_x, None
    return grad_x, grad_weight.to(weight.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def tiles(x: Tensor) -> list[slice]:
    """What is normalised at once, of the first dimension."""
    size = max(1, sizes.NORM_TILE_ELEMENTS * len(x) // max(1, x.numel()))
    return [slice(start, start + size) for start in range(0, len(x), size)]
