"""The MLP of METP: blocks of fc1 and fc2 hop around the ring, past each rank's own tokens."""

from __future__ import annotations

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from megatron_paradyse.strategies.feedforward import activate
from megatron_paradyse.strategies.local_attention import accumulation_dtype
from megatron_paradyse.strategies.ring import TravellingGradient
from megatron_paradyse.strategies.second_run import is_second_run, without_values
from megatron_paradyse.strategies.weight_blocks import (
    add_product_,
    circulate,
    new_packed,
    set_product_,
    unpack,
)


class CirculatingMlp(Function):
    """x [s/p, b, h] and the rank's fc1 [f/p, h] (gated [2 f/p, h]), fc2 [h, f/p], bias or None.

    Forward, for each block: total += activate(x fc1^T + bias) fc2^T, in float32. Keeps x alone. If
    its output is unused it computes and sends nothing.

    Backward runs a block's fc1 and activation again. Its gradient visits the ranks in the order in
    which they use the block, in float32. The owner is the last of them, so that it is at home
    after p-1 hops and none of these is waited for idly.
    """

    @staticmethod
    def forward(ctx, shape, group, x, *weights):
        ctx.shape, ctx.group = shape, group
        ctx.save_for_backward(x, *weights)
        if is_second_run():
            return without_values(x, x.shape)
        own = tuple(weight.detach() for weight in weights if weight is not None)
        rows = x.detach().flatten(0, 1)  # [s/p, b, h] -> [s/p b, h]
        total = torch.zeros_like(rows, dtype=accumulation_dtype(x.dtype))
        for fc1, fc2, *bias in circulate(own, group):
            active = activate(linear(rows, fc1, *bias), shape)
            add_product_(total, active, fc2.t())
            del fc1, fc2, bias, active
        return total.to(x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        shape, group = ctx.shape, ctx.group
        own = tuple(weight.detach() for weight in weights if weight is not None)
        rows, grad = x.flatten(0, 1), grad.flatten(0, 1)
        wide = accumulation_dtype(x.dtype)
        grad_rows = torch.zeros_like(rows, dtype=wide)
        travelling = TravellingGradient(group)
        for block in circulate(own, group, own_last=True):
            grad_block = new_packed(own, wide)
            _block_gradients(block, unpack(grad_block, own), grad_rows, rows, grad, shape)
            del block
            travelling.add(grad_block)
            del grad_block
        grads = iter(part.to(x.dtype) for part in unpack(travelling.home(), own))
        grad_weights = (None if weight is None else next(grads) for weight in weights)
        return None, None, grad_rows.to(x.dtype).view(x.shape), *grad_weights


def _block_gradients(block, grad_block, grad_rows, rows, grad, shape) -> None:
    """Write the gradients of a block to grad_block and add that of x, all over the rank's rows."""
    fc1, fc2, *bias = block
    grad_fc1, grad_fc2, *grad_bias = grad_block
    y = linear(rows, fc1, *bias).requires_grad_()
    with torch.enable_grad():
        active = activate(y, shape)
    set_product_(grad_fc2, grad.t(), active.detach())
    (grad_y,) = torch.autograd.grad(active, y, grad @ fc2)
    del active, y
    set_product_(grad_fc1, grad_y.t(), rows)
    if grad_bias:
        torch.sum(grad_y, 0, dtype=grad_bias[0].dtype, out=grad_bias[0])
    add_product_(grad_rows, grad_y, fc1)
