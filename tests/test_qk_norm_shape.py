"""The norm of queries and keys that strategies run is that of the module, whatever flags say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import L2Norm

from megatron_paradyse.shapes import attention_shape
from megatron_paradyse.strategies.rms_norm import RmsNorm

NORMS = {
    "none in the spec": (IdentityOp(), None),
    "l2": (L2Norm(8), "l2"),
    "with weights": (RmsNorm(8, eps=1e-5), "rmsnorm"),
    "PyTorch's": (torch.nn.RMSNorm(8), "rmsnorm"),
}


@pytest.mark.parametrize("flags", [{"qk_l2_norm": True}, {"qk_layernorm": True}, {}])
@pytest.mark.parametrize("norm", NORMS)
def test_it_is_what_the_module_has(norm, flags):
    """Megatron's local spec of dense layers reads --qk-layernorm alone, beside --qk-l2-norm too."""
    built, expected = NORMS[norm]
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, normalization="RMSNorm", **flags
    )
    module = SimpleNamespace(
        config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, q_layernorm=built
    )
    assert attention_shape(module, training=True).qk_norm == expected
