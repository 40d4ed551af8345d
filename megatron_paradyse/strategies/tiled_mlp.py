"""The MLP of what recomputes, tile by tile over the sequence, when that is long.

An MLP takes each token by itself, so that a tile of the rank's rows is an MLP of a shorter
sequence. It keeps its input, its activations are those of a tile, and its backward runs each tile's
forward again, up to where only its output would be made (second_run.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from megatron_paradyse.strategies.contract import MlpFunction, MlpWeights, Strategy
from megatron_paradyse.strategies.local_attention import accumulation_dtype
from megatron_paradyse.strategies.second_run import is_second_run, second_run, without_values
from megatron_paradyse.strategies.sizes import is_long, positions_of_tile


def tiles(num_positions: int, batch_size: int) -> Iterator[slice]:
    """Slices of the rank's s/p positions: all but the last have positions_of_tile."""
    step = positions_of_tile(batch_size)
    return (slice(i, min(i + step, num_positions)) for i in range(0, num_positions, step))


def goes_in_tiles(x: Tensor) -> bool:
    """Whether x [s/p, b, h] has more rows than a tile."""
    return is_long(len(x), x.shape[1])


def mlp_in_tiles(strategy: Strategy) -> MlpFunction:
    """The MLP of the strategy that goes in tiles of a long sequence, and whole of a short one."""
    in_tiles = strategy.tiled_mlp or tile_by_tile(strategy.mlp)

    def run(x, weights, shape, group):
        return (in_tiles if goes_in_tiles(x) else strategy.mlp)(x, weights, shape, group)

    return run


def tile_by_tile(mlp: MlpFunction) -> MlpFunction:
    """Any MLP, run for each tile: weights that it gathers, it gathers as often.

    Gradients of weights are summed over tiles in the accumulation dtype: in a half type each tile's
    is rounded once. The second run does nothing.
    """

    def run(x, weights, shape, group):
        names = [f.name for f in fields(MlpWeights) if getattr(weights, f.name) is not None]

        def of_tile(x, tensors):
            return mlp(x, replace(weights, **dict(zip(names, tensors, strict=True))), shape, group)

        return _TileByTile.apply(of_tile, x, *(getattr(weights, name) for name in names))

    return run


class _TileByTile(Function):
    @staticmethod
    def forward(ctx, of_tile, x, *tensors):
        ctx.of_tile = of_tile
        ctx.save_for_backward(x, *tensors)
        if is_second_run():
            return without_values(x, x.shape)
        output = torch.empty_like(x)
        for rows in tiles(*x.shape[:2]):
            output[rows] = of_tile(x[rows], tensors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        grad_x = torch.empty_like(x)
        sums = [
            torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) if need else None
            for t, need in zip(tensors, needed, strict=True)
        ]
        for rows in tiles(*x.shape[:2]):
            grad_x[rows] = _add_gradients(ctx.of_tile, x[rows], tensors, sums, grad[rows])
        own = (
            None if total is None else total.to(t.dtype)
            for total, t in zip(sums, tensors, strict=True)
        )
        return None, grad_x, *own


def _add_gradients(of_tile, x: Tensor, tensors, sums, grad: Tensor) -> Tensor:
    """Add the gradients of a tile's weights to their sums; return that of its x."""
    inputs = [
        t.detach().requires_grad_(total is not None) for t, total in zip(tensors, sums, strict=True)
    ]
    x = x.detach().requires_grad_()
    with torch.enable_grad(), second_run():
        output = get_gradient_edge(of_tile(x, inputs))  # the graph, and not its result
    asked = [x, *(t for t in inputs if t.requires_grad)]
    grad_x, *of_weights = torch.autograd.grad(output, asked, grad)
    for total, part in zip((s for s in sums if s is not None), of_weights, strict=True):
        total += part
    return grad_x
