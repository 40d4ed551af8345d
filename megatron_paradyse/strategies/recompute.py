"""+recompute: any strategy, keeping only its input and running again in the backward.

The second run gives what the first gave: attention dropout is a function of positions and a seed,
and nothing else in a strategy is random. Costs one more forward, its communication included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_paradyse.strategies.contract import Strategy


def recomputed(strategy: Strategy) -> Strategy:
    """The strategy with +recompute: same results, kept bytes those of the input [s/p, b, h]."""
    return replace(
        strategy,
        name=f"{strategy.name}+recompute",
        title=f"{strategy.title}+recompute",
        attention=_recomputing(strategy.attention),
        mlp=_recomputing(strategy.mlp),
    )


def _recomputing(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """function(x, weights, ...) as one autograd Function of x and of each weight."""

    @wraps(function)
    def run(x, weights, *arguments):
        names = [f.name for f in fields(weights) if getattr(weights, f.name) is not None]

        def rerun(x, *tensors):
            return function(
                x, replace(weights, **dict(zip(names, tensors, strict=True))), *arguments
            )

        return _Recompute.apply(rerun, x, *(getattr(weights, name) for name in names))

    return run


class _Recompute(Function):
    @staticmethod
    def forward(ctx, rerun, *tensors):
        ctx.rerun = rerun
        ctx.save_for_backward(*tensors)
        return rerun(*tensors)  # a Function's forward records no graph: nothing inside is kept

    @staticmethod
    def backward(ctx, grad):
        needed = ctx.needs_input_grad[1:]
        inputs = [
            t.detach().requires_grad_(need)
            for t, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            output = ctx.rerun(*inputs)
        grads = iter(torch.autograd.grad(output, [t for t in inputs if t.requires_grad], grad))
        return None, *(next(grads) if need else None for need in needed)
