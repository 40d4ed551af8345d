"""The activation that strategies run is that of the module which would run without them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from megatron_paradyse.shapes import mlp_shape

ENGINE = {"use_te_activation_func": True, "transformer_impl": "transformer_engine"}


@pytest.mark.parametrize(
    ("told", "form"),
    [
        ({}, "none"),
        ({"bias_activation_fusion": True}, "tanh"),
        (ENGINE, "tanh"),  # TransformerEngine's operator
        (ENGINE | {"transformer_impl": "local"}, "none"),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_which_form_of_gelu_megatron_computes(told, form, gated):
    config = {
        "activation_func": F.gelu,
        "gated_linear_unit": gated,
        "bias_activation_fusion": False,
        "use_te_activation_func": False,
        "transformer_impl": "transformer_engine",
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
    }
    shape = mlp_shape(SimpleNamespace(**config | told))
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    assert shape.gated == gated
    assert torch.equal(shape.activation(x), F.gelu(x, approximate=form))
    other = {"none": "tanh", "tanh": "none"}[form]
    assert not torch.equal(shape.activation(x), F.gelu(x, approximate=other))
