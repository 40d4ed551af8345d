"""The MLP of the strategies whose name ends in Z, in tiles of the sequence: one gather for all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from megatron_paradyse.strategies.collectives import (
    Pending,
    all_gather_async,
    reduce_gradient_async,
)
from megatron_paradyse.strategies.contract import MlpShape, MlpWeights
from megatron_paradyse.strategies.feedforward import activate, activation_gradient
from megatron_paradyse.strategies.local_attention import accumulation_dtype
from megatron_paradyse.strategies.second_run import is_second_run, without_values
from megatron_paradyse.strategies.tiled_mlp import tiles
from megatron_paradyse.strategies.weight_blocks import add_product_
from megatron_paradyse.strategies.zero import gather_weight


def zero_mlp_in_tiles(
    x: Tensor, weights: MlpWeights, shape: MlpShape, group: ProcessGroup
) -> Tensor:
    """[s/p, b, h] -> [s/p, b, h], as zero_mlp. Keeps x alone; the second run does nothing.

    Sends (p-1)/p of both weights forward; as much again, and their gradients, backward. Both whole
    weights, and in the backward their gradients in the accumulation dtype, are there until the last
    tile.
    """
    return _ZeroMlpInTiles.apply(shape, group, x, weights.fc1, weights.fc2, weights.fc1_bias)


class _ZeroMlpInTiles(Function):
    @staticmethod
    def forward(ctx, shape, group, x, *weights):
        ctx.shape, ctx.group = shape, group
        ctx.save_for_backward(x, *weights)
        if is_second_run():
            return without_values(x, x.shape)
        gathering = _gather(*weights, group)
        output = torch.empty_like(x)
        fc1, fc2, bias = (None if part is None else part.wait() for part in gathering)
        del gathering
        for rows in tiles(*x.shape[:2]):
            active = activate(linear(x[rows], fc1, bias), shape, num_shards=group.size())
            output[rows] = linear(active, fc2.t())
            del active
        return output

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        shape, group, p = ctx.shape, ctx.group, ctx.group.size()
        gathering = _gather(*weights, group)
        grad_x = torch.empty_like(x)
        fc1, fc2, bias = (None if part is None else part.wait() for part in gathering)
        del gathering
        wide = accumulation_dtype(x.dtype)
        sums = [None if w is None else torch.zeros_like(w, dtype=wide) for w in (fc1, fc2, bias)]
        for rows in tiles(*x.shape[:2]):
            y = linear(x[rows], fc1, bias)
            grad_rows = grad[rows].flatten(0, 1)
            active = activate(y, shape, num_shards=p)
            add_product_(sums[1], active.flatten(0, 1).t(), grad_rows)
            del active
            grad_y = activation_gradient(y, grad[rows] @ fc2.t(), shape, num_shards=p)
            del y
            add_product_(sums[0], grad_y.flatten(0, 1).t(), x[rows].flatten(0, 1))
            if bias is not None:
                sums[2] += grad_y.sum((0, 1), dtype=wide)
            grad_x[rows] = grad_y @ fc1
            del grad_y
        del fc1, fc2, bias
        reducing = [
            total if total is None else reduce_gradient_async(total, group) for total in sums
        ]
        del sums
        grads = [
            None if part is None else part.wait().to(w.dtype)
            for part, w in zip(reducing, weights, strict=True)
        ]
        return None, None, grad_x, grads[0], grads[1].t(), grads[2]


def _gather(
    fc1: Tensor, fc2: Tensor, bias: Tensor | None, group: ProcessGroup
) -> tuple[Pending, Pending, Pending | None]:
    """Begin to gather fc1 [f, h] (gated [2 f, h]), the transpose of fc2 [f, h], and the bias."""
    gathering_bias = None if bias is None else all_gather_async(bias.detach(), group)
    return gather_weight(fc1, group), gather_weight(fc2.t(), group), gathering_bias
