"""States of Megatron's distributed optimizer, whichever Adam it has."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_paradyse import plain_adam


def write(self, parameter, tensors):
    """As Megatron does, into a shard in float32: a view of the parameter."""
    parameter.view(-1)[:2].copy_(tensors["param"])


def test_parameters_in_float32_are_written_in_place_with_any_optimizer():
    """Fused ones of TransformerEngine and apex are no torch.optim.Adam."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    holder = SimpleNamespace(optimizer=object())
    plain_adam._but_the_step(write)(holder, parameter, {"param": torch.ones(2)})
    assert parameter.tolist() == [1, 1, 0, 0]


def test_a_plain_adams_step_stays_its_own():
    parameter = torch.nn.Parameter(torch.zeros(4))
    adam = torch.optim.Adam([parameter])
    adam.state[parameter] = {"step": torch.tensor(7.0)}
    holder = SimpleNamespace(optimizer=adam, model_param_group_index_map={parameter: (0, 0)})
    seen = {}
    run = plain_adam._but_the_step(lambda self, parameter, tensors: seen.update(tensors))
    run(holder, parameter, {"param": torch.ones(4), "step": torch.ones(4)})
    assert seen["step"] is adam.state[parameter]["step"]
