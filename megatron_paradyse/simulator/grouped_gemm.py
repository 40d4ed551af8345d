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

from megatron_paradyse.errors import UserError
from megatron_paradyse.simulator.doors import Door, opened


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
        experts = list(self.local_experts)
        doors: list[Door] = [(self, "num_local_experts", 1)]
        for name in ("linear_fc1", "linear_fc2"):
            parts = [getattr(expert, name) for expert in experts]
            doors.append((parts[0], "forward", _grouped([part.weight for part in parts])))
        with opened(doors):
            return found(self, hidden, tokens_per_expert, probs)

    return forward


def _grouped(weights: Sequence[Tensor]) -> Callable[[Tensor], tuple[Tensor, None]]:
    return lambda x: (_GroupedProduct.apply(x, *weights), None)


class _GroupedProduct(Function):
    """x [tokens, k], E weights [m, k] -> [tokens, m]: tokens / E of x times each weight.

    What does not divide is held, and not computed. It has the gradients of all weights at once.
    """

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x, *weights)
        return _products(x, weights[0].t(), len(weights))

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        grad_x = _products(grad, weights[0], len(weights))
        grads = torch.bmm(_parts(grad, len(weights)).transpose(1, 2), _parts(x, len(weights)))
        return grad_x, *grads.unbind()


def _products(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """x [tokens, k], a weight [k, m] that stands for all -> [tokens, m]."""
    result = x.new_empty(len(x), weight.shape[1])
    torch.bmm(_parts(x, count), weight.expand(count, -1, -1), out=_parts(result, count))
    return result


def _parts(x: Tensor, count: int) -> Tensor:
    """[tokens, k] -> [count, tokens / count, k], a view."""
    each = len(x) // count
    return x[: each * count].view(count, each, x.shape[1])
