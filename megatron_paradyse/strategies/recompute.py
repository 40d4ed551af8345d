"""+recompute: any strategy, keeping only its input and running again in the backward.

+offload does the same, and its input waits in host memory (host.py).

The second run gives what the first gave: attention dropout is a function of positions and a seed,
and nothing else in a strategy is random. Costs one more forward, its communication included, less
the end of an MLP, whose output nobody reads the second time (second_run.py).
A long MLP goes in tiles of the sequence (tiled_mlp.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import wraps

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from megatron_paradyse.strategies import OFFLOAD, RECOMPUTE
from megatron_paradyse.strategies.contract import Strategy
from megatron_paradyse.strategies.host import kept_on_host
from megatron_paradyse.strategies.second_run import second_run
from megatron_paradyse.strategies.tiled_mlp import mlp_in_tiles


def recomputed(strategy: Strategy, *, offload: bool) -> Strategy:
    """The strategy with +recompute: same results, kept bytes those of the input [s/p, b, h].

    offload: with +offload; it keeps nothing on the device.
    """
    suffix = OFFLOAD if offload else RECOMPUTE
    return replace(
        strategy,
        name=f"{strategy.name}{suffix}",
        title=f"{strategy.title}{suffix}",
        attention=_recomputing(strategy.attention, offload),
        mlp=_recomputing(mlp_in_tiles(strategy), offload),
    )


def _recomputing(function: Callable[..., Tensor], offload: bool) -> Callable[..., Tensor]:
    """function(x, weights, ...) as one autograd Function of x and of each weight."""

    @wraps(function)
    def run(x, weights, *arguments):
        names = [f.name for f in fields(weights) if getattr(weights, f.name) is not None]

        def rerun(x, *tensors):
            return function(
                x, replace(weights, **dict(zip(names, tensors, strict=True))), *arguments
            )

        given = (getattr(weights, name) for name in names)
        with kept_on_host(x) if offload and torch.is_grad_enabled() else nullcontext():
            return _Recompute.apply(rerun, x, *given)

    return run


class _Recompute(Function):
    @staticmethod
    def forward(ctx, rerun, *tensors):
        ctx.rerun = rerun
        ctx.save_for_backward(*tensors)
        return rerun(*tensors)  # a Function's forward records no graph: nothing inside is kept

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needed = ctx.needs_input_grad[1:]
        inputs = [
            t.detach().requires_grad_(need)
            for t, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad(), second_run():
            output = get_gradient_edge(ctx.rerun(*inputs))  # the graph, and not its result
        grads = iter(torch.autograd.grad(output, [t for t in inputs if t.requires_grad], grad))
        return None, *(next(grads) if need else None for need in needed)
