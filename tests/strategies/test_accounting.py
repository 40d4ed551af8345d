"""The cost formulas against counted communication and measured tensor bytes.

On the fake process group: collectives move nothing and hold nothing, so that every buffer is there
for exactly as long as the code holds it.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies import get_strategy
from megatron_paradyse.strategies.accounting import operation_costs
from megatron_paradyse.strategies.sizes import LayerSizes
from megatron_paradyse.strategies.walks import WALKS
from tests.strategies.layers import AttentionCase, MlpCase
from tests.strategies.memory import measure

TOLERANCE = 0.02


@pytest.fixture(params=[(2, 0), (4, 1), (8, 7)], ids=["p2", "p4", "p8"])
def group(request):
    p, rank = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=p)
    yield dist.new_group(list(range(p)))
    dist.destroy_process_group()


def _cases(strategy: str, operation: str, p: int):
    """Narrow and wide layers, so that now activations dominate and now weights."""
    dtypes = (torch.float32, torch.bfloat16)
    if operation == "mlp":
        for gated, dtype, (h, f) in itertools.product((0, 1), dtypes, ((16, 256), (128, 256))):
            yield MlpCase(strategy, p, bool(gated), bool(gated), h=h, f=f, s=128, b=2, dtype=dtype)
        return
    for mask, g, dtype, h in itertools.product(
        ("causal", "bidirectional"), (8, 2), dtypes, (16, 128)
    ):
        yield AttentionCase(strategy, p, mask, n=8, g=g, d=16, h=h, s=128, dtype=dtype)
    yield AttentionCase(strategy, p, "causal", n=8, g=8, d=16, h=16, s=128, rope="half")
    yield AttentionCase(strategy, p, "causal", n=8, g=8, d=16, h=64, s=128, bias=True)


def _sizes(case: AttentionCase | MlpCase) -> LayerSizes:
    common = {"s": case.s, "b": case.b, "h": case.h, "p": case.p, "bias": case.bias}
    common["element_bytes"] = case.dtype.itemsize
    if isinstance(case, MlpCase):
        return LayerSizes(n=1, g=1, d=1, f=case.f, gated=case.gated, **common)
    return LayerSizes(
        n=case.n,
        g=case.g,
        d=case.d,
        f=1,
        causal=case.mask == "causal",
        rope_channels=0 if case.rope is None else case.d,
        **common,
    )


@pytest.mark.parametrize(("strategy", "operation"), WALKS, ids=map("-".join, WALKS))
def test_formulas_give_sent_bytes_exactly_and_memory_within_two_percent(group, strategy, operation):
    wrong = []
    for case in _cases(strategy, operation, group.size()):
        if operation == "attention":
            get_strategy(strategy).check(case.shape, case.p)
        measured = measure(group, case)
        costs = operation_costs(strategy, operation, _sizes(case))
        for name in ("forward_sent_bytes", "backward_sent_bytes"):
            if getattr(measured, name) != getattr(costs, name):
                wrong.append((case.name, name, getattr(costs, name), getattr(measured, name)))
        for name in ("kept_bytes", "forward_bytes", "backward_bytes"):
            truth, formula = getattr(measured, name), getattr(costs, name)
            if abs(formula / truth - 1) > TOLERANCE:
                wrong.append((case.name, name, formula, truth, f"{formula / truth:.3f}"))
    assert not wrong, "\n" + "\n".join(map(str, wrong))


@pytest.mark.parametrize(("strategy", "operation"), WALKS, ids=map("-".join, WALKS))
def test_recompute_keeps_only_the_input_and_pays_in_the_backward(group, strategy, operation):
    """Its forward frees more than the formula says, which is an upper bound there."""
    name = f"{strategy}+recompute"
    for case in _cases(name, operation, group.size()):
        measured, costs = measure(group, case), operation_costs(name, operation, _sizes(case))
        assert measured.kept_bytes == costs.kept_bytes
        assert measured.forward_bytes <= (1 + TOLERANCE) * costs.forward_bytes
        assert costs.backward_bytes == pytest.approx(measured.backward_bytes, rel=TOLERANCE)
        assert measured.forward_sent_bytes == costs.forward_sent_bytes
        assert measured.backward_sent_bytes == costs.backward_sent_bytes


def test_a_strategy_without_formulas_is_told_to_be_profiled(monkeypatch):
    monkeypatch.delitem(WALKS, ("ulysses_z", "mlp"))
    sizes = LayerSizes(s=8, b=1, h=8, n=2, g=2, d=4, f=16, p=2)
    with pytest.raises(UserError, match="no cost formulas for the mlp of ulysses_z"):
        operation_costs("ulysses_z", "mlp", sizes)
