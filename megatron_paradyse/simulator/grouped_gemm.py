"""All experts of a rank at once, as TransformerEngine computes them with --moe-grouped-gemm.

Megatron without TransformerEngine has its experts one after another, whatever that flag says. In a
simulation the first expert's MLP runs on the tokens of all, and its two products are grouped: one
operator each, forward and for either gradient, whose tiles a device computes together. The streams
over which TransformerEngine issues the products of its experts are taken to fill it as one kernel
would; what the host needs for each of them, in C++, is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.autograd import Function

from megatron_paradyse.doors import Door, opened
from megatron_paradyse.errors import UserError

LINEARS = ("linear_fc1", "linear_fc2")  # of an expert


def check_grouped_gemm(args: argparse.Namespace) -> None:
    """UserError for what it leaves out."""
    if args.moe_grouped_gemm and args.add_bias_linear:
        raise UserError(
            "--moe-grouped-gemm is not simulated with biases of experts: give "
            "--disable-bias-linear, or profile on a device"
        )


@contextlib.contextmanager
def grouped_gemm() -> Iterator[None]:
    """Experts that run inside run together."""
    with opened([(SequentialMLP, "forward", _together(SequentialMLP.forward))]):
        yield


def _together(found: Callable) -> Callable:
    @functools.wraps(found)
    def forward(self: Any, hidden: Tensor, tokens_per_expert: Any, probs: Tensor) -> Any:
        discards = _discards_activation(self.config)
        doors: list[Door] = [
            (self, "num_local_experts", 1),
            (self.local_experts[0], "forward", _of_all(self.local_experts, discards=discards)),
        ]
        with opened(doors):
            return found(self, hidden, tokens_per_expert, probs)

    return forward


def _discards_activation(config: Any) -> bool:
    return config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules


def _of_all(
    experts: Sequence[Any], *, discards: bool
) -> Callable[[Tensor, Tensor], tuple[Tensor, None]]:
    """The forward of the first for all; discards: what the activation makes is not kept.

    What goes into the activation is there to the end, as a name for it is in Megatron's.
    """
    found = experts[0].forward
    first, second = ([getattr(expert, name).weight for expert in experts] for name in LINEARS)
    passing: list[Door] = [
        (getattr(experts[0], name), "forward", lambda x: (x, None)) for name in LINEARS
    ]

    def activate(inner: Tensor, probs: Tensor) -> Tensor:
        with opened(passing):
            return found(inner, probs)[0]

    def forward(hidden: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        inner = _GroupedProduct.apply(None, hidden, *first)
        again = _Again(activate, (inner, probs)) if discards else None
        x = activate(inner, probs) if again is None else _Discarded.apply(again, inner, probs)
        return _GroupedProduct.apply(again, x, *second), None

    return forward


class _Again:
    """x = activate(*given), once more when the backward comes to it; then its gradients."""

    def __init__(self, activate: Callable[..., Tensor], given: tuple[Tensor, ...]):
        self.activate, self._given = activate, given
        self._x: Tensor | None = None

    def x(self) -> Tensor:
        self._given = tuple(tensor.detach().requires_grad_() for tensor in self._given)
        with torch.enable_grad():
            self._x = self.activate(*self._given)
        return self._x.detach()

    def gradients(self, grad: Tensor) -> tuple[Tensor, ...]:
        assert self._x is not None, "the product that x goes into comes first"
        found = torch.autograd.grad(self._x, self._given, grad)
        self._x, self._given = None, ()
        return found


class _Discarded(Function):
    """What again makes, which nothing keeps."""

    @staticmethod
    def forward(ctx, again, *given):
        ctx.again = again
        return again.activate(*given)

    @staticmethod
    def backward(ctx, grad):
        return None, *ctx.again.gradients(grad)


class _GroupedProduct(Function):
    """x [tokens, k], E weights [m, k] -> [tokens, m]: tokens / E of x times each weight.

    What does not divide is held, and not computed. It has the gradients of all weights at once.
    again: makes x in the backward; None: it is kept.
    """

    @staticmethod
    def forward(ctx, again, x, *weights):
        ctx.again = again
        ctx.save_for_backward(None if again else x, *weights)
        return _products(x, weights[0].t(), len(weights))

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        if ctx.again is not None:
            x = ctx.again.x()
        grad_x = _products(grad, weights[0], len(weights))
        grads = torch.bmm(_parts(grad, len(weights)).transpose(1, 2), _parts(x, len(weights)))
        return None, grad_x, *grads.unbind()


def _products(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """x [tokens, k], a weight [k, m] that stands for all -> [tokens, m]."""
    result = x.new_empty(len(x), weight.shape[1])
    torch.bmm(_parts(x, count), weight.expand(count, -1, -1), out=_parts(result, count))
    return result


def _parts(x: Tensor, count: int) -> Tensor:
    """[tokens, k] -> [count, tokens / count, k], a view."""
    each = len(x) // count
    return x[: each * count].view(count, each, x.shape[1])
