"""Modules that strategies read without calling them: what else those compute is found."""

from __future__ import annotations

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp

from megatron_paradyse.core_attention import CoreAttention
from megatron_paradyse.train import read_parts


class Doubled(torch.nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Renamed(torch.nn.LayerNorm):
    """Computes what its class does."""


def changed(how: str) -> torch.nn.Module:
    linear = torch.nn.Linear(2, 2)
    if how == "forward":
        linear.forward = lambda x: 2 * x
    else:
        getattr(linear, f"register_{how}")(lambda *args: None)
    return linear


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("forward", "with a forward of its own"),
        ("forward_hook", "with a forward hook"),
        ("forward_pre_hook", "with a forward pre-hook"),
        ("full_backward_hook", "with a backward hook"),
        ("full_backward_pre_hook", "with a backward hook"),
    ],
)
def test_what_a_linear_was_given_is_found(how, found):
    assert read_parts._more_than_megatrons("linear_fc1", torch.nn.Linear(2, 2)) is None
    assert read_parts._more_than_megatrons("linear_fc1", changed(how)) == found


def test_classes_with_a_forward_of_their_own_are_found():
    own = type("Own", (DotProductAttention,), {"forward": lambda self, x: x})
    for kind in (DotProductAttention, CoreAttention, own):
        more = read_parts._more_than_megatrons("core_attention", _unmade(kind))
        assert more == ("with a forward of its own" if kind is own else None), kind
    for norm in (torch.nn.LayerNorm(2), IdentityOp(), Renamed(2)):
        assert read_parts._more_than_megatrons("q_layernorm", norm) is None
    found = read_parts._more_than_megatrons("k_layernorm", Doubled(2))
    assert found == "with a forward of its own"


def _unmade(kind: type) -> torch.nn.Module:
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    return module


def test_waiting_for_gathered_parameters_is_no_change():
    linear = torch.nn.Linear(2, 2)
    hook = DistributedDataParallel._make_forward_pre_hook(_unmade(DistributedDataParallel))
    linear.register_forward_pre_hook(hook)
    assert read_parts._more_than_megatrons("linear_fc1", linear) is None
