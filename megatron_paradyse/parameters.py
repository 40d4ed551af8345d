"""Parameters of Megatron's modules for strategies, which read them without calling the modules."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from megatron_paradyse.strategies.heads import plus_one_norm
from megatron_paradyse.strategies.rms_norm import rms_norm


def announce_use(*modules) -> None:
    """Run the forward pre-hooks of modules whose parameters a strategy reads without calling them.

    Megatron's distributed optimizer gathers parameters while the forward runs
    (--overlap-param-gather): such a hook waits for those of its module.
    """
    for module in modules:
        if module is not None and module._forward_pre_hooks:
            for number, hook in tuple(module._forward_pre_hooks.items()):
                if number not in module._forward_pre_hooks_with_kwargs:
                    hook(module, ())


def add_from_the_start(module) -> None:
    """Let TransformerEngine's linears inside a module add to main_grad in every backward.

    With gradient accumulation fusion they overwrite it in the backward of their first forward ever:
    for Megatron alone that is the first microbatch of all, whose main_grad is zero. Here strategies
    may have run the microbatches before it. What else the mark says is of FP8, which is refused.
    """
    for part in module.modules():
        if hasattr(part, "is_first_microbatch"):
            part.is_first_microbatch = False


def bias_of(linear):
    """The bias or None. TransformerEngine's linears without a bias hold an empty tensor."""
    bias = linear.bias
    return None if bias is None or bias.numel() == 0 else bias


def normalised(hidden_states, linear, config):
    """The layer norm that TransformerEngine keeps inside its linear, when it does."""
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return hidden_states
    eps = config.layernorm_epsilon
    bias = getattr(linear, "layer_norm_bias", None)
    if config.layernorm_zero_centered_gamma:
        kind = "rmsnorm" if config.normalization == "RMSNorm" else "layernorm"
        return plus_one_norm(hidden_states, weight, bias, kind, eps)
    if config.normalization == "RMSNorm":
        return rms_norm(hidden_states, weight, eps)
    return F.layer_norm(hidden_states, hidden_states.shape[-1:], weight, bias, eps)


def of_strategy(weight, config):
    """The parameter, for a strategy whose gradient arrives through autograd.

    With gradient accumulation fusion, Megatron's own linears add to main_grad themselves and mark
    that in grad_added_to_main_grad, which DDP then trusts for the rest of the iteration.
    """
    if not config.gradient_accumulation_fusion:
        return weight
    return _ThroughAutograd.apply(weight)


class _ThroughAutograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        ctx.parameter = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.parameter.grad_added_to_main_grad = False
        return grad
