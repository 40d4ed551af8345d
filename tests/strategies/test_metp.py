"""What METP promises beyond parity: own buffers, nothing large, whole gradients, known bytes."""

from __future__ import annotations

import functools
import math
from dataclasses import fields
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from megatron_paradyse.errors import UserError
from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.strategies import get_strategy, ring, weight_blocks
from megatron_paradyse.strategies.collectives import (
    Pending,
    count_communication,
    ring_exchange_async,
)
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    Microbatch,
    MlpShape,
    MlpWeights,
)
from megatron_paradyse.strategies.reference import shard_attention, shard_mlp
from tests.strategies.cases import AttentionCase, MlpCase, full_weights, microbatch_of
from tests.strategies.deviations import combine
from tests.strategies.harness import run_ranks
from tests.strategies.layers import map_tensors, rank_layer, run_case

P = 4
ATTENTION = AttentionCase("metp", P, n=8, g=4, s=4 * 37, b=1, bias=True, rope="half")
SHARED_HEADS = AttentionCase("metp", P, n=8, g=1, s=4 * 37, b=1, bias=True, rope="half")
MLP = MlpCase("metp", P, gated=True, bias=True, f=96, s=4 * 37, b=1)
LAYERS = {"attention": ATTENTION, "shared heads": SHARED_HEADS, "mlp": MLP}
COUNTED = {
    case.name: case
    for mask in ("causal", "bidirectional")
    for g in (4, 2)
    if (case := AttentionCase("metp", P, mask, n=8, g=g, s=32, bias=True))
}
MLP_COUNTED = MlpCase("metp", P, gated=True, bias=True)
# n/p query heads that use key/value heads unevenly: (3, 1), and (2, 1).
UNEVEN = {
    case.name: case
    for case in (
        AttentionCase("metp", 4, n=12, g=6, bias=True, rope="half", qk_norm="rmsnorm"),
        AttentionCase("metp", 4, "packed", n=12, g=6, dropout=0.3),
        AttentionCase("metp", 4, n=4, g=1, dropout=0.3, bias=True),
    )
}


def _step_of(case, group):
    """The rank's weights, and a function that runs the layer forward."""
    random = torch.Generator().manual_seed(0)
    full, strategy = full_weights(case, random), get_strategy(case.strategy)
    p, rank = group.size(), group.rank()
    if isinstance(case, MlpCase):
        shard, arguments = shard_mlp(full, case.shape, p, rank), (case.shape, group)
    else:
        shard = shard_attention(full, p, rank)
        arguments = (case.shape, microbatch_of(case), group)
    run = strategy.mlp if isinstance(case, MlpCase) else strategy.attention
    weights = map_tensors(shard, lambda t: t.to(case.dtype, copy=True).requires_grad_())
    x = torch.randn(case.s // p, case.b, case.h, generator=random).requires_grad_()
    return weights, lambda: run(x, weights, *arguments)


def _tensors(weights):
    return [getattr(weights, field.name) for field in fields(weights)]


def _changed_bits(group, case) -> list[bool]:
    weights, step = _step_of(case, group)
    before = map_tensors(weights, lambda t: t.detach().clone())
    step().sum().backward()
    return [
        not torch.equal(now.view(torch.int32), then.view(torch.int32))
        for now, then in zip(_tensors(weights), _tensors(before), strict=True)
        if now is not None
    ]


class _MadeShapes(LiveBytes):
    """The shape of every tensor that an operation returns."""

    def __init__(self):
        super().__init__([])
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.shapes |= {tuple(x.shape) for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return result


def _shapes(group, case) -> set[tuple[int, ...]]:
    _, step = _step_of(case, group)
    with _MadeShapes() as made:
        step().sum().backward()
    return made.shapes


def _sent(group, case) -> tuple[dict[str, int], dict[str, int]]:
    _, step = _step_of(case, group)
    with count_communication() as forward:
        y = step()
    with count_communication() as backward:
        y.sum().backward()
    return dict(forward.sent_bytes), dict(backward.sent_bytes)


def _last_hop_dropped(group, case):
    """The MLP's gradient ring sends zeros on its last hop."""
    hops = []

    def exchange(x, group):
        hops.append(x)
        return Pending(torch.zeros_like(x)) if len(hops) == P - 1 else ring_exchange_async(x, group)

    with mock.patch.object(ring, "ring_exchange_async", exchange):
        return run_case(group, case)


def _gradients_not_reduced(group, case):
    with mock.patch.object(weight_blocks, "reduce_async", lambda x, group, owner: Pending(x)):
        return run_case(group, case)


def _dispatch(group, job_and_case):
    job, case = job_and_case
    return globals()[job](group, case)


@functools.cache
def _results():
    """Every result of this file on P ranks, from one spawn."""
    jobs = {("_changed_bits", name): case for name, case in LAYERS.items()}
    jobs |= {("_shapes", name): case for name, case in LAYERS.items()}
    jobs |= {("_sent", name): case for name, case in (COUNTED | {"mlp": MLP_COUNTED}).items()}
    jobs |= {("run_case", name): case for name, case in UNEVEN.items()}
    jobs["_last_hop_dropped", "mlp"] = MLP_COUNTED
    jobs["_gradients_not_reduced", "attention"] = AttentionCase("metp", P, bias=True)
    cases = {f"{job} {name}": (job, case) for (job, name), case in jobs.items()}
    return run_ranks(P, _dispatch, cases, timeout_seconds=120)


@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_the_same_bit_for_bit_after_a_step(name):
    assert not any(map(any, _results()[f"_changed_bits {name}"]))


@pytest.mark.parametrize("name", LAYERS)
def test_no_tensor_is_as_long_as_the_sequence_or_as_large_as_a_weight(name):
    case = LAYERS[name]
    smallest = case.f * case.h if name == "mlp" else case.n * case.d * case.h
    for shapes in _results()[f"_shapes {name}"]:
        assert not [shape for shape in shapes if case.s in shape]
        assert max(map(math.prod, shapes)) < smallest


@pytest.mark.parametrize("name", UNEVEN)
def test_heads_that_blocks_share_unevenly_match_float64_reference(name):
    errors = combine(_results()[f"run_case {name}"])
    assert max(part.relative for part in errors.values()) <= 1e-5, errors


@pytest.mark.parametrize(
    ("job", "spoilt"),
    [
        ("_last_hop_dropped mlp", {"fc1", "fc2", "fc1_bias"}),
        ("_gradients_not_reduced attention", {"qkv", "proj", "qkv_bias"}),
    ],
)
def test_parity_catches_a_gradient_that_does_not_reach_its_owner(job, spoilt):
    errors = combine(_results()[job])
    assert {name for name, part in errors.items() if part.relative > 1e-2} == spoilt
    assert all(part.relative <= 1e-5 for name, part in errors.items() if name not in spoilt)


@pytest.mark.parametrize("name", COUNTED)
def test_attention_sends_the_bytes_of_the_formula(name):
    case = COUNTED[name]
    g = max(case.g, P)  # as P % g == 0
    rows = (case.n + 2 * g) * case.d
    weights = (rows + case.n * case.d) * case.h + rows
    keys_and_values = 2 * case.s * case.b * g * case.d
    hops = (P - 1) * keys_and_values * 4 // P
    swaps = case.s // P * case.b * case.h * 4 if case.shape.causal else 0
    for forward, backward in _results()[f"_sent {name}"]:
        assert ("all_to_all" in forward) == ("all_to_all" in backward) == (case.g % P != 0)
        assert forward["send"] == hops + swaps
        assert backward["send"] == 2 * hops + swaps  # keys and values, and their gradients
        assert forward["broadcast"] == backward["broadcast"] == (P - 1) * weights * 4 // P
        assert backward["reduce"] == (P - 1) * weights * 4 // P


def test_mlp_sends_the_bytes_of_the_formula():
    case = MLP_COUNTED
    weights = 2 * case.f * case.h + case.f * case.h + 2 * case.f  # gated fc1, fc2, bias
    for forward, backward in _results()["_sent mlp"]:
        assert forward == {"send": (P - 1) * weights * 4 // P}
        assert backward == {"send": (P - 1) * weights * (4 + 4) // P}


def test_check_refuses_heads_that_do_not_split_and_names_a_remedy():
    shape = AttentionShape(12, 12, 8, causal=True, softmax_scale=1.0)
    with pytest.raises(UserError, match=r"n % p == 0, got n=12, p=8: use megatron_cz, or p=4"):
        get_strategy("metp").check(shape, 8)


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _peak_bytes(name: str, group, *, h: int, s: int) -> int:
    """Peak, over forward and backward, of what one GPT layer's attention and MLP hold."""
    p, n, strategy = group.size(), h // 128, get_strategy(name)
    with FakeTensorMode():

        def new(*size: int):
            return torch.empty(*size, dtype=torch.bfloat16, requires_grad=True)

        attention = AttentionWeights(new(3 * h // p, h), new(h, h // p))
        mlp = MlpWeights(new(4 * h // p, h), new(h, 4 * h // p))
        x = new(s // p, 1, h)
        weights = [attention.qkv, attention.proj, mlp.fc1, mlp.fc2]
        shape = AttentionShape(n, n, 128, causal=True, softmax_scale=128**-0.5)
        with LiveBytes([x, *weights]) as made:
            # Copies stand for the norms, whose outputs nobody else keeps.
            y = strategy.attention(x.clone(), attention, shape, Microbatch(s, 1), group)
            y = strategy.mlp(y.clone(), mlp, MlpShape(F.gelu, gated=False), group)
            edge, grad = get_gradient_edge(y), torch.empty_like(y)
            del y
            torch.autograd.backward(edge, grad)
        return made.peak_bytes


def test_peak_is_less_than_half_of_ulysses_at_16_hidden_sizes(fake_group):
    h = 12288
    metp, ulysses = (_peak_bytes(name, fake_group, h=h, s=16 * h) for name in ("metp", "ulysses_z"))
    assert 2 * metp < ulysses, (metp, ulysses)


def _strided(group, case: AttentionCase) -> bool:
    layer = rank_layer(group, case)
    plain = layer.x.detach()
    strided = plain.transpose(0, 1).contiguous().transpose(0, 1)
    grads = []
    for x in (plain, strided.requires_grad_()):
        x = x.requires_grad_()
        grads.append(torch.autograd.grad(layer.run(x, layer.weights), x, layer.grad)[0])
    return not strided.is_contiguous() and torch.equal(*grads)


def test_the_input_may_have_any_strides():
    case = AttentionCase("metp", 1, "bidirectional")
    assert run_ranks(1, _strided, {"strided": case})["strided"] == [True]
