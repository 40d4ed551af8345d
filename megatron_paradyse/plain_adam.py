"""Checkpoints that Megatron 0.19 saves and cannot load: of its distributed optimizer with PyTorch's
Adam, and in float32 with any; of SGD.

The distributed optimizer writes parameters in float32 in place, which autograd refuses. Where
neither TransformerEngine nor apex is installed, it asks an optimizer that has not stepped for its
step, takes the step for a tensor of the gradient buffer, and gives all parameters one step, which
each of them then counts on. SGD's momenta have no place in an optimizer that has not stepped.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

STEP = "step"


def install() -> None:
    """Patch Megatron's optimizers, once."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    of_any: Any = MegatronOptimizer
    of_any.__init__ = _with_momenta(of_any.__init__)
    optimizer: Any = DistributedOptimizer
    optimizer.state_dict = _after_a_step(optimizer.state_dict)
    optimizer.load_state_dict = _with_steps_apart(optimizer.load_state_dict)
    name = "_set_main_param_and_optimizer_states"
    setattr(optimizer, name, _but_the_step(getattr(optimizer, name)))


def _with_momenta(initialise):
    @functools.wraps(initialise)
    def initialise_with(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        if self.init_state_fn is None and "momentum" in getattr(self.optimizer, "defaults", ()):
            self.init_state_fn = _momenta_of_zeros

    return initialise_with


def _momenta_of_zeros(optimizer: torch.optim.Optimizer, config: object = None) -> None:
    """What SGD's state is after a step, of parameters that have none; without momentum nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault(
                "momentum_buffer", torch.zeros_like(parameter.data)
            )


def _is_adam(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def _after_a_step(state_dict):
    @functools.wraps(state_dict)
    def state_of_zeros(self, *args, **kwargs):
        if _is_adam(self.optimizer) and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        STEP: torch.zeros(()),
                        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                    }
        return state_dict(self, *args, **kwargs)

    return state_of_zeros


def _with_steps_apart(load_state_dict):
    @functools.wraps(load_state_dict)
    def load_and_part(self, *args, **kwargs):
        load_state_dict(self, *args, **kwargs)
        for state in self.optimizer.state.values() if _is_adam(self.optimizer) else ():
            state[STEP] = state[STEP].clone()

    return load_and_part


def _but_the_step(set_states):
    """A plain Adam's came with the groups of parameters already."""

    @functools.wraps(set_states)
    def set_but_step(self, model_param, tensors):
        if _is_adam(self.optimizer):
            group, place = self.model_param_group_index_map[model_param]
            parameter = self.optimizer.param_groups[group]["params"][place]
            tensors = {**tensors, STEP: self.optimizer.state[parameter].get(STEP)}
        with torch.no_grad():
            set_states(self, model_param, tensors)

    return set_but_step
