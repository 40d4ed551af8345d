"""The cost formulas against counted communication and measured tensor bytes.

On the fake process group: collectives move nothing and hold nothing, so that every buffer is there
for exactly as long as the code holds it.
"""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies import get_strategy
from megatron_paradyse.strategies import sizes as sizes_module
from megatron_paradyse.strategies.accounting import (
    attention_bytes,
    operation_costs,
    packed_attention_sent,
)
from megatron_paradyse.strategies.contract import LatentSizes
from megatron_paradyse.strategies.memory import Measured
from megatron_paradyse.strategies.sizes import LayerSizes
from megatron_paradyse.strategies.walks import WALKS
from tests.strategies.cases import AttentionCase, MlpCase
from tests.strategies.fake_ranks import measure_rank, on_fake_ranks, sizes_of
from tests.strategies.layers import rank_layer

TOLERANCE = 0.02
aten = torch.ops.aten


def _by_rank(case: AttentionCase | MlpCase, job) -> list:
    """job(group, case) as each rank of p, one after the other; as the last where it decides."""
    differ = case.strategy.startswith(("metp", "megatron_cz")) and isinstance(case, AttentionCase)
    return on_fake_ranks(case, job, range(case.p) if differ else (case.p - 1,))


def _worst(case: AttentionCase | MlpCase) -> Measured:
    """Of each quantity, the largest that any rank has."""
    by_rank = _by_rank(case, measure_rank)
    return Measured(**{f.name: max(getattr(m, f.name) for m in by_rank) for f in fields(Measured)})


def _cases(strategy: str, operation: str, p: int):
    """Narrow and wide layers, so that now activations dominate and now weights."""
    if p == 3:
        yield from _odd_cases(strategy, operation)
        return
    dtypes = (torch.float32, torch.bfloat16) if p < 8 else (torch.bfloat16,)
    if operation == "mlp":
        for gated, dtype, (h, f) in itertools.product((0, 1), dtypes, ((16, 256), (128, 256))):
            yield MlpCase(strategy, p, bool(gated), bool(gated), h=h, f=f, s=128, b=2, dtype=dtype)
        return
    masks = ("causal", "bidirectional") if p < 8 else ("causal",)
    for chosen in itertools.product(*(enumerate(f) for f in (masks, (8, 2), dtypes, (16, 128)))):
        if p < 8 and sum(index for index, _ in chosen) % 2:
            continue  # half of them, in which three factors at a time still meet in every way
        mask, g, dtype, h = (value for _, value in chosen)
        yield AttentionCase(strategy, p, mask, n=8, g=g, d=16, h=h, s=128, dtype=dtype)
    if p == 8:
        yield AttentionCase(strategy, p, "bidirectional", n=8, g=2, d=16, h=128, s=128)
    yield AttentionCase(strategy, p, "causal", n=8, g=8, d=16, h=16, s=128, rope="half")
    if p < 8:
        yield AttentionCase(strategy, p, "causal", n=8, g=p, d=16, h=16, s=128, rope="half")
    yield AttentionCase(strategy, p, "causal", n=8, g=1, d=16, h=16, s=128, rope="half")
    yield AttentionCase(strategy, p, "causal", n=p, g=p // 2, d=16, h=16, s=128, rope="half")
    yield AttentionCase(strategy, p, "causal", n=8, g=8, d=16, h=64, s=128, bias=True)
    gated = AttentionCase(strategy, p, "causal", n=8, g=8, d=16, h=16, s=128, gate=True)
    yield replace(gated, dtype=dtypes[-1])
    yield replace(gated, g=1, h=96, bias=True)
    if p < 8:
        yield replace(gated, g=2, rope="half")
        yield replace(gated, mask="bidirectional", g=p, h=128, dtype=torch.bfloat16, rope="half")


def _odd_cases(strategy: str, operation: str):
    """Of 3 ranks, one of which swaps no halves; of chunks that do not halve, and single heads."""
    if operation == "mlp":
        yield MlpCase(strategy, 3, True, True, h=24, f=144, s=99, b=1)
        yield MlpCase(strategy, 3, h=120, f=48, s=51, b=3, dtype=torch.bfloat16)
        return
    bfloat16 = {"dtype": torch.bfloat16}
    yield AttentionCase(strategy, 3, "causal", n=6, g=6, d=16, h=96, s=144, **bfloat16)
    yield AttentionCase(strategy, 3, "causal", n=6, g=3, d=8, h=24, s=99, bias=True)
    yield AttentionCase(strategy, 3, "bidirectional", n=3, g=1, d=24, h=24, s=99, b=1)
    yield AttentionCase(strategy, 3, "causal", n=3, g=1, d=24, h=24, s=99, b=1, **bfloat16)
    yield AttentionCase(strategy, 3, "causal", n=6, g=3, d=8, h=24, s=99, bias=True, gate=True)
    yield AttentionCase(strategy, 3, "bidirectional", n=3, g=1, d=24, h=24, s=99, b=1, gate=True)
    if strategy.startswith(("megatron_cz", "colossal_z")):
        for mask, more in itertools.product(("causal", "bidirectional"), ({}, bfloat16)):
            yield AttentionCase(strategy, 3, mask, n=1, g=1, d=24, h=12, s=96, b=1, **more)
    if strategy.startswith("metp"):  # whose rank that holds most is not the first
        shared = {"n": 6, "d": 24, "h": 96, "s": 48, "b": 1}
        yield AttentionCase(strategy, 2, "bidirectional", g=3, **shared, **bfloat16)
        for g in (2, 1):  # a rank's rows times h outweigh a block of weights
            sizes = {"n": 2, "g": g, "d": 16, "h": 512, "s": 256, "b": 1}
            yield AttentionCase(strategy, 2, "causal", **sizes, **bfloat16)
        yield AttentionCase(strategy, 3, "causal", g=2, bias=True, **shared)
        yield AttentionCase(strategy, 3, "causal", g=2, bias=True, gate=True, **shared)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize(("strategy", "operation"), WALKS, ids=map("-".join, WALKS))
def test_formulas_give_sent_bytes_exactly_and_memory_within_two_percent(p, strategy, operation):
    wrong = []
    for case in _cases(strategy, operation, p):
        if operation == "attention":
            get_strategy(strategy).check(case.shape, case.p)
        measured = _worst(case)
        costs = operation_costs(strategy, operation, sizes_of(case))
        for name in ("forward_sent_bytes", "backward_sent_bytes"):
            if getattr(measured, name) != getattr(costs, name):
                wrong.append((case.name, name, getattr(costs, name), getattr(measured, name)))
        for name in ("kept_bytes", "forward_bytes", "backward_bytes"):
            truth, formula = getattr(measured, name), getattr(costs, name)
            if abs(formula / truth - 1) > TOLERANCE:
                wrong.append((case.name, name, formula, truth, f"{formula / truth:.3f}"))
    assert not wrong, "\n" + "\n".join(map(str, wrong))


_NORMED = {  # name -> of all that a norm and the rest of the layer may be, an eighth
    f"{qk_norm}{suffix}-{dtype}-p{p}": AttentionCase(
        suffix, p, n=8, g=g, d=64, h=h, s=128, dtype=dtype, rope=rope, qk_norm=qk_norm
    )
    for i, qk_norm in enumerate(("layernorm", "rmsnorm", "l2"))
    for j, (dtype, suffix) in enumerate(
        itertools.product((torch.float32, torch.bfloat16), ("", "+recompute"))
    )
    for p, g, h, rope in [
        [(2, 8, 16, "half"), (4, 2, 128, None), (2, 2, 16, None), (4, 8, 128, "half")][(i + j) % 4]
    ]
} | {
    "one head a rank": AttentionCase(
        "", 4, n=4, g=4, d=64, h=16, s=128, rope="half", qk_norm="rmsnorm"
    ),
    "one key head": AttentionCase(
        "", 2, n=8, g=1, d=64, h=16, s=128, rope="half", qk_norm="layernorm"
    ),
}


@pytest.mark.parametrize("strategy", [name for name, half in WALKS if half == "attention"])
@pytest.mark.parametrize("normed", _NORMED)
def test_norms_of_heads_hold_what_the_walk_says(strategy, normed):
    """Of heads as wide as models have them, whose statistics are a small part."""
    case = replace(_NORMED[normed], strategy=strategy + _NORMED[normed].strategy)
    measured, costs = _worst(case), operation_costs(case.strategy, "attention", sizes_of(case))
    copies_of_weights = 4 * 4 * case.d  # in float32, of a norm in half types
    assert 0 <= measured.kept_bytes - costs.kept_bytes <= copies_of_weights
    assert costs.forward_bytes == pytest.approx(measured.forward_bytes, rel=TOLERANCE)
    assert costs.backward_bytes == pytest.approx(measured.backward_bytes, rel=TOLERANCE)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize(("strategy", "operation"), WALKS, ids=map("-".join, WALKS))
def test_recompute_keeps_only_the_input_and_pays_in_the_backward(p, strategy, operation):
    name = f"{strategy}+recompute"
    every = {4: 2, 8: 3}.get(p, 1)  # of rings, each rank walked, a case takes seconds
    for case in itertools.islice(_cases(name, operation, p), None, None, every):
        measured, costs = _worst(case), operation_costs(name, operation, sizes_of(case))
        assert measured.kept_bytes == costs.kept_bytes
        assert costs.forward_bytes == pytest.approx(measured.forward_bytes, rel=TOLERANCE)
        assert costs.backward_bytes == pytest.approx(measured.backward_bytes, rel=TOLERANCE)
        assert measured.forward_sent_bytes == costs.forward_sent_bytes
        assert measured.backward_sent_bytes == costs.backward_sent_bytes


@pytest.mark.parametrize(("p", "rows"), [(2, 6), (4, 8), (8, 6)])
@pytest.mark.parametrize("strategy", ["megatron_ts", "ulysses_z", "metp"])
def test_an_mlp_in_tiles_costs_what_its_tiles_do(p, rows, strategy, monkeypatch):
    """Of 128/p positions and b = 2: tiles alike, or a smaller last one."""
    name = f"{strategy}+recompute"
    for plain in _cases(name, "mlp", p):
        case = replace(plain, tile_rows=rows)
        whole = operation_costs(name, "mlp", sizes_of(case))
        with monkeypatch.context() as patch:
            patch.setattr(sizes_module, "TILE_ROWS", rows)
            measured, costs = _worst(case), operation_costs(name, "mlp", sizes_of(case))
            flops = _by_rank(case, _flops)[-1]
        assert measured.kept_bytes == costs.kept_bytes == whole.kept_bytes
        assert costs.forward_bytes == pytest.approx(measured.forward_bytes, rel=TOLERANCE)
        assert costs.backward_bytes == pytest.approx(measured.backward_bytes, rel=TOLERANCE)
        assert measured.forward_sent_bytes == costs.forward_sent_bytes
        assert measured.backward_sent_bytes == costs.backward_sent_bytes
        assert flops == (costs.forward_flops, costs.backward_flops)
        assert flops == (whole.forward_flops, whole.backward_flops)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("name", ["metp", "metp+recompute"])
def test_a_long_attention_of_metp_holds_what_the_walk_says(p, name, monkeypatch):
    """Of long sequences products are added in pieces, and a second run has a ring per key head."""
    monkeypatch.setattr(sizes_module, "TILE_ROWS", 8)
    for plain in itertools.islice(_cases(name, "attention", p), None, None, 2 if p == 4 else 1):
        case = replace(plain, tile_rows=8)
        measured, costs = _worst(case), operation_costs(name, "attention", sizes_of(case))
        assert measured.kept_bytes == costs.kept_bytes
        assert costs.forward_bytes == pytest.approx(measured.forward_bytes, rel=TOLERANCE)
        assert costs.backward_bytes == pytest.approx(measured.backward_bytes, rel=TOLERANCE)
        assert measured.forward_sent_bytes == costs.forward_sent_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", [name for name, half in WALKS if half == "attention"])
def test_a_gate_of_a_long_sequence_goes_in_tiles(strategy, dtype, monkeypatch):
    case = AttentionCase(strategy, 2, n=8, d=16, h=16, s=128, dtype=dtype, gate=True)
    whole = operation_costs(strategy, "attention", sizes_of(case))
    monkeypatch.setattr(sizes_module, "TILE_ROWS", 8)
    costs = operation_costs(strategy, "attention", sizes_of(case))
    measured = _worst(replace(case, tile_rows=8))
    for name in ("kept_bytes", "forward_bytes", "backward_bytes"):
        assert getattr(measured, name) == getattr(costs, name) <= getattr(whole, name)


@pytest.mark.parametrize(("strategy", "operation"), WALKS, ids=map("-".join, WALKS))
def test_offload_keeps_nothing_and_brings_the_input_back(strategy, operation):
    name = f"{strategy}+offload"
    case = next(_cases(name, operation, 2))
    measured, costs = _worst(case), operation_costs(name, operation, sizes_of(case))
    assert measured.kept_bytes == costs.kept_bytes == 0
    assert costs.forward_bytes == pytest.approx(measured.forward_bytes, rel=TOLERANCE)
    assert costs.backward_bytes == pytest.approx(measured.backward_bytes, rel=TOLERANCE)
    again = operation_costs(f"{strategy}+recompute", operation, sizes_of(case))
    assert costs.backward_bytes == again.backward_bytes + again.kept_bytes


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("strategy", [name for name, half in WALKS if half == "attention"])
def test_bytes_of_attention_are_those_of_the_ranks_that_hold_most(strategy, p):
    for name in (strategy, f"{strategy}+recompute"):
        for case in itertools.islice(_cases(name, "attention", p), None, None, 3):
            costs = operation_costs(name, "attention", sizes_of(case))
            assert attention_bytes(name, sizes_of(case)) == (
                costs.kept_bytes,
                costs.forward_bytes,
                costs.backward_bytes,
            )


def _attention_flops(q, k, num_products: int, causal: bool) -> int:
    """Of [b, n, sq, d] and [b, g, sk, d]; the kernels skip the masked half of a causal square."""
    (b, n, rows, d), columns = q, k[2]
    scores = rows * (rows + 1) // 2 if causal else rows * columns
    return num_products * 2 * b * n * d * scores


def _flash_forward(q, k, v, dropout=0.0, causal=False, *rest, out_shape, **options) -> int:
    return _attention_flops(q, k, 2, causal)


def _flash_backward(
    grad, q, k, v, out, lse, dropout=0.0, causal=False, *rest, out_shape, **options
) -> int:
    return _attention_flops(q, k, 5, causal)


def _add_product(total, a, b, *, out_shape, **options) -> int:
    return 2 * a[0] * a[1] * b[1]


def _flops(group, case: AttentionCase | MlpCase) -> tuple[int, int]:
    """Counted products, forward and backward."""
    counted = {
        aten._scaled_dot_product_flash_attention_for_cpu: _flash_forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
        aten.addmm_: _add_product,
    }
    layer = rank_layer(group, case)
    with FlopCounterMode(display=False, custom_mapping=counted) as forward:
        output = layer.run(layer.x, layer.weights)
    with FlopCounterMode(display=False, custom_mapping=counted) as backward:
        output.backward(layer.grad)
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize(("strategy", "operation"), WALKS, ids=map("-".join, WALKS))
def test_flops_are_those_of_the_counted_products(p, strategy, operation):
    """Of the rank that has most, in float32: dtypes have the same products."""
    for name in (strategy, f"{strategy}+recompute"):
        cases = [case for case in _cases(name, operation, p) if case.dtype == torch.float32]
        for case in cases[:: 2 if p == 4 else 1]:
            forward, backward = (max(flops) for flops in zip(*_by_rank(case, _flops), strict=True))
            costs = operation_costs(name, operation, sizes_of(case))
            assert forward == costs.forward_flops, case.name
            assert backward == costs.backward_flops, case.name


def test_a_strategy_without_formulas_is_told_to_be_profiled(monkeypatch):
    monkeypatch.delitem(WALKS, ("ulysses_z", "mlp"))
    sizes = LayerSizes(s=8, b=1, h=8, n=2, g=2, d=4, f=16, p=2)
    with pytest.raises(UserError, match="no cost formulas for the mlp of ulysses_z"):
        operation_costs("ulysses_z", "mlp", sizes)


def test_latent_attention_has_no_formulas_of_products_and_bytes_sent():
    latent = LatentSizes(keys=4, content=2, positions=2, value=4)
    sizes = LayerSizes(s=8, b=1, h=8, n=2, g=2, d=4, f=16, p=2, latent=latent, query_latents=4)
    with pytest.raises(UserError, match="no cost formulas for latent attention"):
        operation_costs("ulysses_z", "attention", sizes)
    with pytest.raises(UserError, match="no cost formulas for latent attention"):
        packed_attention_sent("ulysses_z", sizes, keys_sent=0, keys_received=0)
    of_heads = replace(sizes, latent=None)
    assert operation_costs("metp", "mlp", sizes) == operation_costs("metp", "mlp", of_heads)
