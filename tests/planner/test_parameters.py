"""About how many parameters a stage has, by a cost file's description."""

from __future__ import annotations

import dataclasses

from megatron_paradyse.planner.pipeline import parameters
from tests.costs.synthetic import DESCRIPTION

H, N, VOCABULARY, FFN = 64, 8, 1000, 96
MODEL = {"hidden_size": H, "num_heads": N, "vocab_size": VOCABULARY, "ffn_size": FFN}
MLP = 3 * H * FFN


def described(halves=None, gated=True, **model):
    shape = dataclasses.replace(DESCRIPTION.model, **MODEL, **model, gated=gated)
    return dataclasses.replace(DESCRIPTION, model=shape, halves=halves)


def test_matrices_of_layers_and_one_vocabulary_are_counted():
    one = described(num_kv_heads=2, head_dim=8)
    layer = H * (N + 2 * 2) * 8 + N * 8 * H + MLP
    assert parameters(one, 3) == 3 * layer + VOCABULARY * H
    assert parameters(one, 3, edge=False) == 3 * layer
    plain = described(gated=False, num_kv_heads=2, head_dim=8)
    assert parameters(plain, 3, edge=False) == 3 * (layer - H * FFN)


def test_gates_of_the_attentions_output_are_as_many_as_queries():
    plain, gated = (
        described({"attention": {"qk_norm": 0, **gate}, "mlp": {}}, num_kv_heads=2, head_dim=10)
        for gate in ({}, {"output_gate": 1})
    )
    assert parameters(gated, 3) == parameters(plain, 3) + 3 * H * N * 10


def test_latent_attentions_have_their_down_and_up_projections():
    sizes = {"kv_lora_rank": 16, "qk_head_dim": 12, "qk_pos_emb_head_dim": 8, "v_head_dim": 10}
    common = H * (16 + 8) + 16 * N * (12 + 10) + N * 10 * H + MLP
    for rank, queries in ((24, 24 * H + N * 20 * 24), (0, N * 20 * H)):
        halves = {"attention": sizes | {"q_lora_rank": rank}, "mlp": {"experts": 0}}
        assert parameters(described(halves), 1, edge=False) == queries + common
