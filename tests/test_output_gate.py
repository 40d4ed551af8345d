"""The gated attention that strategies are compared with is Megatron's own module's."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.strategies.cases import AttentionCase
from tests.strategies.deviations import combine
from tests.strategies.harness import run_ranks
from tests.strategies.layers import rank_layer, run_case

TOLERANCE = 1e-6  # Megatron takes the sigmoid in float32 in a model of float64 too
CASES = {
    case.name: case
    for p, n, g in ((1, 4, 4), (1, 6, 2), (1, 4, 1), (2, 4, 1))
    for more in ({}, {"bias": True, "rope": "half"} | ({"qk_norm": "rmsnorm"} if p == 1 else {}))
    for case in (AttentionCase("megatron_ts", p, n=n, g=g, gate=True, dtype=torch.float64, **more),)
}


class _Core(MegatronModule):
    """Causal softmax attention; Megatron's own asks for CUDA's random numbers."""

    def __init__(self, config, *_, **unused):
        super().__init__(config)

    def forward(self, query, key, value, *_, **unused):
        key, value = (
            t.repeat_interleave(query.shape[2] // t.shape[2], dim=2) for t in (key, value)
        )
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * query.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        probs = torch.softmax(scores.masked_fill(future, float("-inf")), -1)
        return torch.einsum("bnqk,kbnd->qbnd", probs, value).flatten(2)


def _megatrons(case: AttentionCase) -> SelfAttention:
    torch.cuda.current_device = lambda: torch.device("cpu")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(case.p)
    config = TransformerConfig(
        num_layers=1, hidden_size=case.h, num_attention_heads=case.n, num_query_groups=case.g,
        kv_channels=case.d, attention_output_gate=True, add_bias_linear=False,
        add_qkv_bias=case.bias, qk_layernorm=case.qk_norm is not None, normalization="RMSNorm",
        layernorm_epsilon=case.shape.qk_norm_eps, attention_dropout=0.0, hidden_dropout=0.0,
        transformer_impl="local", apply_rope_fusion=False, use_cpu_initialization=True,
        tensor_model_parallel_size=case.p, sequence_parallel=case.p > 1,
    )  # fmt: skip
    spec = get_gpt_layer_local_submodules(
        qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    ).self_attention
    spec.submodules.core_attention = _Core
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(spec, config=config, layer_number=1, pg_collection=groups).to(case.dtype)


def _run(group, case: AttentionCase):
    layer, module = rank_layer(group, case), _megatrons(case)
    table = layer.microbatch.rope
    rotation = None if table is None else table[:, None, None, :]

    def run(x, weights):
        named = {
            "linear_qkv.weight": weights.qkv,
            "linear_qkv.bias": weights.qkv_bias,
            "linear_proj.weight": weights.proj,
            "q_layernorm.weight": weights.q_norm,
            "k_layernorm.weight": weights.k_norm,
        }
        given = {name: tensor for name, tensor in named.items() if tensor is not None}
        assert given.keys() == dict(module.named_parameters()).keys()
        out, _ = torch.func.functional_call(module, given, (x, None), {"rotary_pos_emb": rotation})
        return out

    return run_case(group, case, layer=replace(layer, run=run))


@functools.cache
def _results(p: int):
    found = run_ranks(p, _run, {name: case for name, case in CASES.items() if case.p == p})
    return {name: combine(ranks) for name, ranks in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_definition_equals_megatrons_own_module(name):
    """On one rank, and on ranks that share heads: which rows of linear_qkv are whose gates."""
    errors = {tensor: part.relative for tensor, part in _results(CASES[name].p)[name].items()}
    assert max(errors.values()) <= TOLERANCE, errors
