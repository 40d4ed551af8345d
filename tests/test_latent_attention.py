"""Multi-latent attention with every strategy equals the definition in float64, and Megatron's."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding

from megatron_paradyse.latent_attention import SwitchableLatentAttention
from megatron_paradyse.model_edges import attach_edges
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.strategies import get_strategy, strategy_names
from megatron_paradyse.strategies.contract import Microbatch
from tests.latent_layers import LatentCase, errors_of, run_cases, worst_error
from tests.packing.rows import zigzag

TOLERANCE = 1e-6  # angles, cosine and sine are of float32
VARIANTS = {
    "plain": {},
    "no rank of queries": {"q_rank": None, "norm": None},
    "no rank of queries, norms": {"q_rank": None, "rope": "yarn"},
    "no rank of queries, layer norms": {"q_rank": None, "norm": "LayerNorm"},
    "YaRN, wide values": {"rope": "yarn", "value": 14, "norm": "LayerNorm"},
    "offset, window": {"softmax": "learnable", "window": 5, "value": 4},
    "dropout, padding": {"dropout": 0.3, "padded": True},
    "of TransformerEngine": {"engine": True, "rope": "yarn"},
}

HALVES = {"in bfloat16": {}, "in bfloat16, YaRN, wide": {"value": 14, "rope": "yarn"}}


def cases(p: int) -> dict[str, LatentCase]:
    found = {}
    for strategy, (name, options) in itertools.product(strategy_names(), VARIANTS.items()):
        found[f"{strategy}, {name}"] = LatentCase(strategy, p, **options)
    for name in (
        "plain",
        "no rank of queries",
        "no rank of queries, norms",
        "YaRN, wide values",
        "offset, window",
    ):
        found[f"generated, {name}"] = LatentCase("megatron_ts", p, generates=True, **VARIANTS[name])
    for strategy in strategy_names(packed=True):
        for name, row in (("in order", contiguous((9, 3, 5), p)), ("dealt", zigzag((13, 2, 7), p))):
            found[f"{strategy}, packed {name}"] = LatentCase(strategy, p, row=row, rope="yarn")
    return {name: case for name, case in found.items() if _takes(case)}


def _takes(case: LatentCase) -> bool:
    takes = get_strategy(case.strategy).takes
    if takes is None:
        return True
    row = case.row  # all that strategies of packed rows alone are given
    microbatch = Microbatch(row.seq_length, 1, documents=case.documents, shards=row.shards)
    return takes(microbatch, case.p)


def half_cases(p: int) -> dict[str, LatentCase]:
    return {
        f"{strategy}, {name}": LatentCase(strategy, p, dtype=torch.bfloat16, **options)
        for strategy, (name, options) in itertools.product(strategy_names(), HALVES.items())
    }


CASES = {p: cases(p) for p in (1, 2, 4)}
HALF_CASES = {p: half_cases(p) for p in CASES}


@functools.cache
def results(p: int):
    return run_cases(CASES[p] | HALF_CASES[p], p)


@pytest.mark.parametrize(
    ("p", "name"), [(p, name) for p, of in CASES.items() for name in of], ids=str
)
def test_every_strategy_equals_the_definition(p, name):
    error, of = worst_error(CASES[p][name], results(p)[name])
    assert error < TOLERANCE, (of, error)


OF_MEGATRON = {
    name: LatentCase("megatron_ts", 1, **options)
    for name, options in VARIANTS.items()
    if not {"softmax", "dropout", "engine"} & {*options} and "no rank of queries, " not in name
}


def test_the_definition_equals_megatrons_own_module():
    """On one rank; its attention is the test's, for it has none without TransformerEngine, and
    none of norms before queries without a rank.
    """
    found = run_cases(OF_MEGATRON, 1, megatrons=True)
    for name, case in OF_MEGATRON.items():
        error, of = worst_error(case, found[name])
        assert error < TOLERANCE, (name, of, error)


@pytest.mark.parametrize("options", HALVES)
@pytest.mark.parametrize("p", [2, 4])
def test_in_bfloat16_no_strategy_errs_twice_as_much_as_one_process(p, options):
    def errors(p: int, strategy: str) -> dict[str, float]:
        name = f"{strategy}, {options}"
        return errors_of(HALF_CASES[p][name], results(p)[name])

    expected = errors(1, "megatron_ts")
    for strategy in strategy_names():
        found = errors(p, strategy)
        assert all(found[of] <= 2 * expected[of] for of in expected), (strategy, found, expected)


def test_the_layers_of_a_model_share_one_table_of_angles(monkeypatch):
    """Each of Megatron's layers would have its own, of the longest length."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    layers = [bare_attention(YarnRotaryEmbedding(4, use_cpu_initialization=True)) for _ in range(3)]
    attach_edges([torch.nn.ModuleList(layers)], head_tile="off")
    tables = [layer.rotary_pos_emb(7)[0].untyped_storage().data_ptr() for layer in layers]
    assert len(set(tables)) == 1


def bare_attention(rotary) -> SwitchableLatentAttention:
    module = object.__new__(SwitchableLatentAttention)
    torch.nn.Module.__init__(module)
    module.rotary_pos_emb = rotary
    return module
