"""An RMSNorm that keeps its input and one number per row, as PyTorch's own does on a GPU only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

TILE_ELEMENTS = 1 << 18  # normalised at once: what is wider than the input is made of so many


class RmsNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm over the last dimension, with the memory of one fused kernel.

    On a GPU PyTorch's kernel runs. Elsewhere F.rms_norm is made of many operations that keep
    float32 copies of the input; here they run in tiles of rows, and again in the backward.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return _InTiles.apply(x, self.weight, self.eps)


class _InTiles(Function):
    """x [..., h], weight [h] -> [..., h]; keeps x and the inverse root mean square [rows, 1]."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, scale = normalise(x.detach().reshape(-1, x.shape[-1]), weight.detach(), eps)
        ctx.save_for_backward(x, weight, scale)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        rows, grad_rows = (t.reshape(-1, x.shape[-1]) for t in (x, grad))
        grad_x, grad_weight = normalise_backward(grad_rows, rows, weight, scale)
        return grad_x.view(x.shape), grad_weight, None


def normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [rows, h] -> y [rows, h] and 1 / sqrt(mean(x^2) + eps) [rows, 1], at least float32."""
    wide = _wide(x)
    y, scale = torch.empty_like(x), x.new_empty(len(x), 1, dtype=wide)
    for tile in tiles(x):
        part = x[tile].to(wide)
        torch.rsqrt(part.square().mean(-1, keepdim=True) + eps, out=scale[tile])
        y[tile] = part * scale[tile] * weight
    return y, scale


def normalise_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x [rows, h] and of weight [h]."""
    wide = _wide(x)
    grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=wide)
    for tile in tiles(x):
        hat = x[tile].to(wide) * scale[tile]  # normalised
        part = grad[tile].to(wide)
        grad_weight += (part * hat).sum(0)
        part = part * weight
        grad_x[tile] = scale[tile] * (part - hat * (part * hat).mean(-1, keepdim=True))
    return grad_x, grad_weight.to(weight.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def tiles(x: Tensor) -> list[slice]:
    """Rows that are normalised at once."""
    rows = max(1, TILE_ELEMENTS // x.shape[-1])
    return [slice(start, start + rows) for start in range(0, len(x), rows)]
