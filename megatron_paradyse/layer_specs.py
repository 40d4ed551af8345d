"""Megatron's own layer specs with attention and MLP that can switch their strategy.

Give one to Megatron as --spec megatron_paradyse.layer_specs gpt_layer_spec, or bert_layer_spec;
--paradyse does.
"""

from __future__ import annotations

import dataclasses
import functools

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.bert.bert_layer_specs import (
    bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    _get_block_submodules,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.models.gpt import default_layer_spec

from megatron_paradyse.attention import SwitchableSelfAttention
from megatron_paradyse.core_attention import CoreAttention, TorchNorm
from megatron_paradyse.errors import UserError
from megatron_paradyse.latent_attention import SwitchableLatentAttention
from megatron_paradyse.submodules import SwitchableLayer, SwitchableMLP

# Of Megatron's attentions: ours, and its norms of queries and keys
ATTENTIONS = {
    SelfAttention: (SwitchableSelfAttention, ("q_layernorm", "k_layernorm")),
    MLASelfAttention: (SwitchableLatentAttention, ("q_layernorm", "kv_layernorm")),
}


def gpt_layer_spec(config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The block that Megatron would build from this GPTModelConfig, with switchable submodules.

    Parameters keep Megatron's names, shapes, shards and initialisation. Mixture-of-experts layers
    keep Megatron's MLP.
    """
    return switchable_block(default_layer_spec(config, vp_stage), config.transformer, vp_stage)


def bert_layer_spec(config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """As gpt_layer_spec, of Megatron's bidirectional BERT layer."""
    uses_engine = config.transformer.transformer_impl == "transformer_engine"
    layer = get_bert_layer_with_transformer_engine_spec() if uses_engine else bert_layer_local_spec
    return switchable_block(layer, config.transformer, vp_stage)


def switchable_block(spec, model, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Of Megatron's spec of a layer or a block, and its TransformerConfig."""
    block = _get_block_submodules(model, spec, vp_stage)
    layers = [switchable_layer(spec, model) for spec in block.layer_specs]
    return TransformerBlockSubmodules(
        layer_specs=layers, layer_norm=norm_for(block.layer_norm, model)
    )


def switchable_layer(spec: ModuleSpec, model) -> ModuleSpec:
    if spec.module is SwitchableLayer:  # made so before
        return spec
    if spec.module is not TransformerLayer:
        raise UserError(f"--paradyse cannot switch layers of type {spec.module.__name__}: drop it")
    old = spec.submodules
    submodules = dataclasses.replace(
        old,
        input_layernorm=norm_for(old.input_layernorm, model),
        pre_mlp_layernorm=norm_for(old.pre_mlp_layernorm, model),
        self_attention=_switchable_attention(old.self_attention, model),
        mlp=_switchable_mlp(old.mlp),
    )
    return ModuleSpec(module=SwitchableLayer, params=spec.params, submodules=submodules)


def _switchable_attention(spec: ModuleSpec, model) -> ModuleSpec:
    if spec.module not in ATTENTIONS:
        raise UserError(f"--paradyse cannot switch {spec.module.__name__}: use self-attention")
    module, norms = ATTENTIONS[spec.module]
    old = spec.submodules
    core = old.core_attention
    fused_kernel = model.attention_backend not in (AttnBackend.local, AttnBackend.unfused)
    # Latent attention cannot be built on Megatron's own without TransformerEngine.
    if core is DotProductAttention and (fused_kernel or spec.module is MLASelfAttention):
        core = CoreAttention
    submodules = dataclasses.replace(
        old,
        core_attention=core,
        **{name: norm_for(getattr(old, name), model) for name in norms},
    )
    return ModuleSpec(module=module, params=spec.params, submodules=submodules)


def _switchable_mlp(builder):
    """MLP.as_mlp_submodule -> SwitchableMLP.as_mlp_submodule; other builders stay as they are."""
    if isinstance(builder, functools.partial) and builder.func == MLP.as_mlp_submodule:
        return functools.partial(SwitchableMLP.as_mlp_submodule, *builder.args, **builder.keywords)
    return builder


def norm_for(builder, model):
    """Ours where Megatron's cannot be built for this TransformerConfig.

    Its wrapper of PyTorch's refuses sequence parallelism, and apex's kernel, which Megatron takes
    where apex is installed without TransformerEngine, has no RMSNorm.
    """
    of_apex = builder is FusedLayerNorm and model.normalization != "LayerNorm"
    return TorchNorm if builder is WrappedTorchNorm or of_apex else builder
