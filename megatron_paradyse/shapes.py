"""What strategies must know of a Megatron model: its attention and MLP shapes."""

from __future__ import annotations

import functools
import math

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as yarn_factor,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn import functional as F

from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies.contract import AttentionShape, MlpShape


def attention_shape(module, *, training: bool) -> AttentionShape:
    """The shape of a Megatron attention module (its config, layer_number and attn_mask_type)."""
    config = module.config
    windowed = is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, module.layer_number
    )
    return _attention_shape(
        config.num_attention_heads,
        config.num_query_groups,
        config.kv_channels,
        module.attn_mask_type == AttnMaskType.causal,
        config.softmax_scale,
        tuple(config.window_size) if windowed else None,
        config.attention_dropout if training else 0.0,
        config.rotary_interleaved,
        yarn_factor(config),
        _qk_norm(module),
        config.layernorm_epsilon,
        config.layernorm_zero_centered_gamma,
        config.attention_output_gate,
    )


def _qk_norm(module) -> str | None:
    """By what the module has: some of Megatron's specs leave the norm of the flags out, and of both
    of them take the one with weights.
    """
    norm = getattr(module, "q_layernorm", None)  # a core attention has none
    if norm is None or isinstance(norm, IdentityOp):
        return None
    return "l2" if isinstance(norm, L2Norm) else module.config.normalization


@functools.cache
def _attention_shape(
    num_heads,
    num_kv_heads,
    head_dim,
    causal,
    scale,
    window,
    dropout,
    interleaved,
    rope_scale,
    qk_norm,
    eps,
    plus_one,
    output_gate,
) -> AttentionShape:
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        causal=causal,
        softmax_scale=1.0 / math.sqrt(head_dim) if scale is None else scale,
        window=None if window is None else window[0] + 1,
        dropout=dropout,
        rope_interleaved=interleaved,
        rope_scale=rope_scale,
        qk_norm=None if qk_norm is None else qk_norm.lower(),
        qk_norm_eps=eps,
        qk_norm_plus_one=plus_one,
        output_gate=output_gate,
    )


def only_megatrons_mlp(config) -> bool:
    """Whether no strategy computes the activation of a Megatron MLP, nor tiles of it."""
    return config.activation_func_clamp_value is not None or bool(config.glu_linear_offset)


def mlp_shape(config) -> MlpShape:
    """The shape of a Megatron MLP, with the activation that its own forward would compute."""
    if only_megatrons_mlp(config):
        raise UserError(
            "--activation-func-clamp-value and --glu-linear-offset run in Megatron's own MLP only: "
            "use --paradyse-policy fixed:megatron_ts"
        )
    # What Megatron's fused kernels and TransformerEngine's operator compute of GELU.
    by_engine = config.use_te_activation_func and config.transformer_impl == "transformer_engine"
    tanh = bool(config.bias_activation_fusion or by_engine)
    return _mlp_shape(config.activation_func, config.gated_linear_unit, tanh)


@functools.cache
def _mlp_shape(activation, gated: bool, tanh: bool) -> MlpShape:
    if activation is F.gelu and tanh:
        activation = functools.partial(F.gelu, approximate="tanh")
    return MlpShape(activation=activation, gated=gated)
