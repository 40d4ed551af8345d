"""Mixtures of experts in simulations: how many tokens each gets, and on how many ranks they lie.

That their bytes are those of real ranks: test_simulated_bytes.py.
"""

from __future__ import annotations

import argparse
import types

import pytest
import torch

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.costs.table import BYTE_QUANTITIES
from megatron_paradyse.errors import UserError
from megatron_paradyse.simulator.even_experts import check_experts, even_experts, num_ranks
from tests.simulator.small_models import COMMON, GPT, LENGTH, simulated
from tests.train.harness import run_forked

OVER = "--expert-model-parallel-size"
PARTS = "--expert-tensor-parallel-size"


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ([], 4),
        ([OVER, "2", PARTS, "1"], 4),
        ([OVER, "2"], 8),
        ([f"{OVER}=8", PARTS, "2"], 16),
        ([OVER, "8", PARTS, "1", OVER, "2"], 4),
        ([OVER, "8", PARTS, "3"], 24),
        ([OVER, "many"], 4),
    ],
)
def test_experts_have_the_ranks_of_as_many_replicas_as_they_need(flags, ranks):
    assert num_ranks(flags, 4) == ranks


def test_what_goes_on_until_values_are_even_is_refused():
    given = {"num_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}
    with pytest.raises(UserError, match="sinkhorn is not simulated"):
        check_experts(argparse.Namespace(**given))
    check_experts(argparse.Namespace(**given | {"num_experts": None}))
    check_experts(argparse.Namespace(**given | {"moe_router_load_balancing_type": "aux_loss"}))


def dispatcher(**config) -> types.SimpleNamespace:
    """Of rank 1 of 2 replicas' experts, 2 of 4, each on one of 2 ranks."""
    given = {"moe_router_topk": 2, "moe_expert_capacity_factor": None} | config
    return types.SimpleNamespace(
        config=types.SimpleNamespace(**given),
        num_experts=4,
        local_expert_indices=[2, 3],
        ep_size=2,
        tp_size=2,
        drop_and_pad=False,
        sort_input_by_local_experts=torch.arange(8),
    )


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ({}, [2, 3]),  # 5 tokens, 2 experts each: 2, 3, 2 and 3
        ({"moe_expert_capacity_factor": 0.8}, [2, 2]),  # of 10 / 4 each, and of that 0.8
    ],
)
def test_every_expert_gets_as_many_tokens_within_its_capacity(config, own, monkeypatch):
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "preprocess", lambda *of: torch.zeros(2))
    there = dispatcher(**config)
    with even_experts():
        tokens = MoEAlltoAllTokenDispatcher.preprocess(there, torch.zeros(5, 4, dtype=torch.bool))
    assert tokens.tolist() == [4 * count for count in own]  # of 4 ranks
    assert there.num_global_tokens_per_local_expert.tolist() == [own] * 4
    assert there.input_splits.tolist() == [sum(own), sum(own)]
    assert there.output_splits.tolist() == [sum(own)] * 2
    assert there.output_splits_tp.tolist() == [2 * sum(own)] * 2
    assert there.num_out_tokens == 2 * sum(own)


def test_counts_that_are_padded_to_a_capacity_stay_where_megatron_has_them(monkeypatch):
    """On a GPU's stand-in experts would wait for it, to read what is known."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "preprocess", lambda *of: torch.zeros(2))
    there = dispatcher(moe_expert_capacity_factor=1.0)
    there.drop_and_pad = True
    routing_map = torch.zeros(5, 4, dtype=torch.bool, device="meta")
    with even_experts():
        tokens = MoEAlltoAllTokenDispatcher.preprocess(there, routing_map)
    assert (tokens.tolist(), there.num_out_tokens) == ([12, 12], 12)
    assert there.input_splits is there.output_splits is there.output_splits_tp is None


def test_a_stand_in_exchanges_as_many_tokens_as_the_simulation(tmp_path):
    """With ranks of another replica too; what its own router says does not count."""
    output = tmp_path / "costs.json"
    experts = ["--num-experts", 8, "--moe-router-topk", 2, "--disable-bias-linear", OVER, 4]
    flags = [*GPT, *experts, PARTS, 1, "--moe-token-dispatcher-type", "alltoall"]
    argv = [output, "nvlink3", 2, "megatron_ts", LENGTH, *flags, *COMMON]
    code, _, stderr = run_forked(
        "tests.simulator.stand_in_driver", [str(a) for a in argv], ranks=1, folder=tmp_path,
        timeout_seconds=100,
    )  # fmt: skip
    assert code == 0, stderr[-4000:]
    table = read_cost_file(output).table
    fake = simulated(tmp_path / "fake", flags, 2, strategies=("megatron_ts",))
    assert table.description.experts_shared and fake.description.experts_shared
    for real, other in zip(table.measurements, fake.measurements, strict=True):
        assert real.is_ok and (real.strategy, real.operation) == (other.strategy, other.operation)
        for name in BYTE_QUANTITIES:
            expected = pytest.approx(getattr(other, name), rel=0.01, abs=64)
            assert getattr(real, name) == expected, (name, real, other)
