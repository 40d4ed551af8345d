"""A linear that adds its weight's gradient where Megatron keeps it, and such a weight."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.distributed import DistributedDataParallel


class FusedLinear(torch.autograd.Function):
    """Adds the weight's gradient to main_grad itself, marks that, and returns a dummy.

    overwrites: it does not add it, but sets it.
    """

    @staticmethod
    def forward(ctx, x, weight, overwrites):
        ctx.save_for_backward(x)
        ctx.weight, ctx.overwrites = weight, overwrites
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.overwrites:
            ctx.weight.main_grad.zero_()
        ctx.weight.main_grad.add_(grad.t() @ x)
        ctx.weight.grad_added_to_main_grad = True
        return grad @ ctx.weight, torch.full_like(ctx.weight, float("nan")), None


def parameter_under_ddp() -> torch.nn.Parameter:
    """With main_grad and the very hook of Megatron's DistributedDataParallel."""
    weight = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    weight.main_grad = torch.zeros_like(weight)
    weight.grad_added_to_main_grad = False
    ddp = SimpleNamespace(
        param_to_bucket_group={weight: None},
        ddp_config=SimpleNamespace(overlap_grad_reduce=False),
    )
    hook = DistributedDataParallel._make_backward_post_hook(ddp, weight)
    weight.register_post_accumulate_grad_hook(hook)
    return weight
