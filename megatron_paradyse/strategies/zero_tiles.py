"""The MLP of the strategies whose name ends in Z, in tiles of the sequence: one gather for all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
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
        gathering, gathering_fc2 = _gather(weights, group)
        output = torch.empty_like(x)
        fc1, bias = _gathered(gathering)
        fc2 = None
        for rows in tiles(*x.shape[:2]):
            active = activate(linear(x[rows], fc1, bias), shape, num_shards=group.size())
            fc2 = gathering_fc2.wait() if fc2 is None else fc2
            output[rows] = linear(active, fc2.t())
            del active
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Sums of gradients go to their owners while the last tile is computed."""
        x, *weights = ctx.saved_tensors
        shape, group, p = ctx.shape, ctx.group, ctx.group.size()
        gathering, gathering_fc2 = _gather(weights, group)
        grad_x = torch.empty_like(x)
        fc1, bias = _gathered(gathering)
        fc2 = gathering_fc2.wait()
        wide = accumulation_dtype(x.dtype)
        sums = {"fc1": torch.empty_like(fc1, dtype=wide), "fc2": torch.empty_like(fc2, dtype=wide)}
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        reducing = []
        for rows in tiles(*x.shape[:2]):
            is_first, is_last = rows.start == 0, rows.stop == len(x)
            y = linear(x[rows], fc1, bias)
            active = activate(y, shape, num_shards=p)
            of_rows = grad[rows].flatten(0, 1)
            add_product_(sums["fc2"], active.flatten(0, 1).t(), of_rows, anew=is_first)
            del active
            if is_last:
                reducing.append(reduce_gradient_async(sums.pop("fc2"), group))
            grad_y = activation_gradient(y, grad[rows] @ fc2.t(), shape, num_shards=p)
            del y
            of_rows = x[rows].flatten(0, 1)
            add_product_(sums["fc1"], grad_y.flatten(0, 1).t(), of_rows, anew=is_first)
            if of_bias is not None:
                of_bias += grad_y.sum((0, 1), dtype=wide)
            if is_last:
                reducing.append(reduce_gradient_async(sums.pop("fc1"), group))
            grad_x[rows] = grad_y @ fc1
            del grad_y
        del fc1, fc2, bias
        reducing_bias = None if of_bias is None else reduce_gradient_async(of_bias, group)
        del of_bias
        grad_fc2, grad_fc1 = (part.wait().to(x.dtype) for part in reducing)
        grad_bias = None if reducing_bias is None else reducing_bias.wait().to(x.dtype)
        return None, None, grad_x, grad_fc1, grad_fc2.t(), grad_bias


_Gathering = tuple[Pending, Pending | None]


def _gather(weights, group: ProcessGroup) -> tuple[_Gathering, Pending]:
    """Begin to gather fc1 [f, h] (gated [2 f, h]) and the bias, and the transpose of fc2 [f, h]."""
    fc1, fc2, bias = weights
    gathering = gather_weight(fc1, group)
    gathering_bias = None if bias is None else all_gather_async(bias.detach(), group)
    return (gathering, gathering_bias), gather_weight(fc2.t(), group)


def _gathered(gathering: _Gathering) -> tuple[Tensor, Tensor | None]:
    fc1, bias = gathering
    return fc1.wait(), None if bias is None else bias.wait()
