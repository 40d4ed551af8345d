"""Which parts of Megatron's specs switch, and which stay as they came."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_paradyse import layer_specs
from megatron_paradyse.attention import SwitchableSelfAttention
from megatron_paradyse.core_attention import CoreAttention, TorchNorm
from megatron_paradyse.errors import UserError
from megatron_paradyse.latent_attention import SwitchableLatentAttention
from megatron_paradyse.layer_specs import switchable_layer
from megatron_paradyse.submodules import SwitchableLayer, SwitchableMLP


def _model(backend=AttnBackend.auto, implementation="local"):
    return SimpleNamespace(
        attention_backend=backend, normalization="LayerNorm", transformer_impl=implementation
    )


@pytest.mark.parametrize("latent", [False, True])
def test_a_layer_switches_with_megatrons_parameters_and_mask(latent):
    old = get_gpt_layer_local_spec(qk_layernorm=True, multi_latent_attention=latent)
    new = switchable_layer(old, _model())
    assert new.module is SwitchableLayer and new.params is old.params
    was, attention = old.submodules.self_attention, new.submodules.self_attention
    switchable = SwitchableLatentAttention if latent else SwitchableSelfAttention
    assert attention.module is switchable
    assert attention.params == {"attn_mask_type": AttnMaskType.causal}
    norms = ("q_layernorm", "kv_layernorm" if latent else "k_layernorm")
    assert {getattr(was.submodules, name) for name in norms} == {WrappedTorchNorm}
    assert {getattr(attention.submodules, name) for name in norms} == {TorchNorm}
    assert new.submodules.input_layernorm is new.submodules.pre_mlp_layernorm is TorchNorm
    assert attention.submodules.linear_proj is was.submodules.linear_proj
    assert new.submodules.mlp.func == SwitchableMLP.as_mlp_submodule
    assert new.submodules.mlp.keywords == old.submodules.mlp.keywords != {}
    assert new.submodules.self_attn_bda is old.submodules.self_attn_bda
    assert old.submodules.mlp.func == MLP.as_mlp_submodule, "what was given stays"


@pytest.mark.parametrize(
    ("backend", "latent", "core"),
    [
        (AttnBackend.auto, False, CoreAttention),
        (AttnBackend.flash, False, CoreAttention),
        (AttnBackend.local, False, DotProductAttention),
        (AttnBackend.unfused, False, DotProductAttention),
        (AttnBackend.unfused, True, CoreAttention),
    ],
)
def test_megatrons_unfused_attention_runs_where_it_is_asked_for(backend, latent, core):
    spec = get_gpt_layer_local_spec(multi_latent_attention=latent)
    new = switchable_layer(spec, _model(backend)).submodules.self_attention.submodules
    assert new.core_attention is core
    spec.submodules.self_attention.submodules.core_attention = IdentityOp
    new = switchable_layer(spec, _model(backend)).submodules.self_attention.submodules
    assert new.core_attention is IdentityOp, "TransformerEngine's, say"


def _experts():
    raise AssertionError


@pytest.mark.parametrize("builder", [_experts, functools.partial(_experts, 1)])
def test_experts_keep_megatrons_mlp(builder):
    spec = get_gpt_layer_local_spec()
    spec.submodules.mlp = builder
    assert switchable_layer(spec, _model()).submodules.mlp is builder


def test_what_cannot_switch_is_named():
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention = ModuleSpec(module=IdentityOp)
    with pytest.raises(UserError, match="cannot switch IdentityOp: use self-attention"):
        switchable_layer(spec, _model())
    with pytest.raises(UserError, match="cannot switch layers of type MLP: drop it"):
        switchable_layer(ModuleSpec(module=MLP), _model())


def _built(monkeypatch) -> list:
    """What _get_block_submodules is asked for; it makes a block of two layers."""
    asked: list = []

    def build(model, spec, vp_stage):
        asked.append((model, spec, vp_stage))
        return TransformerBlockSubmodules(layer_specs=[spec, spec], layer_norm=WrappedTorchNorm)

    monkeypatch.setattr(layer_specs, "_get_block_submodules", build)
    return asked


def test_every_layer_of_a_stage_of_a_gpt_switches_and_its_last_norm_can_be_built(monkeypatch):
    asked, spec = _built(monkeypatch), get_gpt_layer_local_spec()
    config = SimpleNamespace(transformer=_model())
    specs = {(id(config), 3): spec}
    monkeypatch.setattr(
        layer_specs, "default_layer_spec", lambda model, stage: specs[id(model), stage]
    )
    block = layer_specs.gpt_layer_spec(config, 3)
    assert asked == [(config.transformer, spec, 3)]
    assert [layer.module for layer in block.layer_specs] == [SwitchableLayer] * 2
    assert block.layer_norm is TorchNorm


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_a_bert_has_the_layers_of_its_implementation(implementation, monkeypatch):
    asked, of_engine = _built(monkeypatch), get_gpt_layer_local_spec()
    name = "get_bert_layer_with_transformer_engine_spec"
    monkeypatch.setattr(layer_specs, name, lambda: of_engine)
    model = _model(implementation=implementation)
    block = layer_specs.bert_layer_spec(SimpleNamespace(transformer=model), 1)
    local = implementation == "local"
    spec = layer_specs.bert_layer_local_spec if local else of_engine
    assert asked == [(model, spec, 1)]
    mask = AttnMaskType.padding if local else AttnMaskType.causal
    assert block.layer_specs[1].submodules.self_attention.params["attn_mask_type"] is mask
