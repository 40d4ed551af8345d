"""Mixtures of experts in simulations: how many tokens each gets, and on how many ranks they lie.

That their bytes are those of real ranks: test_simulated_bytes.py.
"""

from __future__ import annotations

import argparse
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.costs.table import BYTE_QUANTITIES
from megatron_paradyse.errors import UserError
from megatron_paradyse.simulator.even_experts import check_balancing, even_experts, num_ranks
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
        check_balancing(argparse.Namespace(**given))
    check_balancing(argparse.Namespace(**given | {"num_experts": None}))
    check_balancing(argparse.Namespace(**given | {"moe_router_load_balancing_type": "aux_loss"}))


def dispatcher(**config) -> types.SimpleNamespace:
    """Of 2 experts in the middle of 4, of 2 replicas' experts, each on 2 ranks."""
    given = {"moe_router_topk": 2, "moe_expert_capacity_factor": None} | config
    return types.SimpleNamespace(
        config=types.SimpleNamespace(**given),
        num_experts=4,
        local_expert_indices=[1, 2],
        ep_size=2,
        tp_size=2,
        drop_and_pad=False,
        input_splits=None,
    )


def preprocessed(there: types.SimpleNamespace, routing_map: torch.Tensor, monkeypatch):
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "preprocess", lambda _, given: given)
    with even_experts():
        return MoEAlltoAllTokenDispatcher.preprocess(there, routing_map)


CAPACITY = {"moe_expert_capacity_factor": 0.8}  # of 10 / 4, and of that 0.8: 2


@pytest.mark.parametrize(
    ("config", "own"),
    [({}, [3, 2]), (CAPACITY, [2, 2])],  # 5 tokens, 2 experts each: 3, 3, 2 and 2
)
def test_every_expert_gets_as_many_tokens_within_its_capacity(config, own, monkeypatch):
    there = dispatcher(**config)
    with FakeTensorMode():
        tokens = preprocessed(there, torch.zeros(5, 4, dtype=torch.bool), monkeypatch)
    assert tokens.tolist() == [4 * count for count in own]  # of 4 ranks
    assert there.num_global_tokens_per_local_expert.tolist() == [own] * 4
    assert there.input_splits.tolist() == ([4, 4] if config else [6, 4])
    assert there.output_splits.tolist() == [sum(own)] * 2
    assert there.output_splits_tp.tolist() == [2 * sum(own)] * 2
    assert there.num_out_tokens == sum(there.input_splits)


def test_what_is_padded_to_a_capacity_is_exchanged_evenly(monkeypatch):
    there = dispatcher(**CAPACITY)
    there.drop_and_pad = True
    with FakeTensorMode():
        tokens = preprocessed(there, torch.zeros(5, 4, dtype=torch.bool), monkeypatch)
    assert (tokens.tolist(), there.num_out_tokens, there.input_splits) == ([8, 8], 8, None)


@pytest.mark.parametrize(("config", "counts"), [({}, [3, 3, 2, 2]), (CAPACITY, [2, 2, 2, 2])])
def test_real_tokens_go_to_experts_in_turns(config, counts, monkeypatch):
    """Autograd has multiplied by the map, and must not mind."""
    routing_map, weights = torch.zeros(5, 4, dtype=torch.bool), torch.ones(5, 4, requires_grad=True)
    product = weights * routing_map
    assert preprocessed(dispatcher(**config), routing_map, monkeypatch) is routing_map
    assert routing_map.sum(dim=0).tolist() == counts
    assert routing_map[0].tolist() == [True, True, False, False]
    product.sum().backward()


@pytest.mark.parametrize(
    "exchanged", [[OVER, 4, PARTS, 1, "--moe-token-dispatcher-type", "alltoall"], [OVER, 1]]
)
def test_a_stand_in_exchanges_as_many_tokens_as_the_simulation(exchanged, tmp_path):
    """With ranks of another replica too; what its own router says does not count."""
    output = tmp_path / "costs.json"
    experts = ["--num-experts", 8, "--moe-router-topk", 2, "--disable-bias-linear"]
    flags = [*GPT, *experts, *exchanged]
    argv = [output, "nvlink3", 2, "megatron_ts", LENGTH, *flags, *COMMON]
    code, _, stderr = run_forked(
        "tests.simulator.stand_in_driver", [str(a) for a in argv], ranks=1, folder=tmp_path,
        timeout_seconds=100,
    )  # fmt: skip
    assert code == 0, stderr[-4000:]
    table = read_cost_file(output).table
    fake = simulated(tmp_path / "fake", flags, 2, strategies=("megatron_ts",))
    assert table.description.experts_shared == fake.description.experts_shared == (4 in exchanged)
    for real, other in zip(table.measurements, fake.measurements, strict=True):
        assert real.is_ok and (real.strategy, real.operation) == (other.strategy, other.operation)
        for name in BYTE_QUANTITIES:
            expected = pytest.approx(getattr(other, name), rel=0.01, abs=64)
            assert getattr(real, name) == expected, (name, real, other)
