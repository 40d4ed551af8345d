"""Collectives: what arrives where, their duals, and the bytes that are counted."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_paradyse.strategies import collectives, transport
from megatron_paradyse.strategies.collectives import count_communication
from tests.strategies.harness import CaseFailedError, run_every_case, run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _arrivals(group, dtype) -> dict[str, bool]:
    """Each collective on small integers, exact in every dtype."""
    p, rank = group.size(), group.rank()
    x = torch.arange(6, dtype=dtype).view(3, 2) + 10 * rank
    every = [torch.arange(6, dtype=dtype).view(3, 2) + 10 * r for r in range(p)]
    whole = torch.arange(2 * p, dtype=dtype).view(p, 2) * (rank + 1)
    blocks = torch.stack([torch.full((2,), 10 * rank + to, dtype=dtype) for to in range(p)])
    total = sum(range(1, p + 1))
    received = torch.stack([torch.full((2,), 10 * r + rank, dtype=dtype) for r in range(p)])
    mirror = collectives.swap_halves(x, group)
    halves = x[:2], every[p - 1 - rank][2:]
    around = [collectives.ring_exchange_async(y, group).wait() for y in (x, x.t())]
    reduced = collectives.reduce_gradient_async(whole, group).wait()
    return {
        "all_gather": torch.equal(collectives.all_gather(x, group), torch.cat(every)),
        "reduce_scatter": torch.equal(
            collectives.reduce_scatter(whole, group)[0],
            torch.arange(2 * p, dtype=dtype).view(p, 2)[rank] * total,
        ),
        "all_to_all": torch.equal(collectives.all_to_all(blocks, group), received),
        "ring": torch.equal(around[0], every[(rank - 1) % p]),
        "strided": torch.equal(around[1], every[(rank - 1) % p].t()),
        "swap": torch.equal(mirror, torch.cat(halves if 2 * rank < p else halves[::-1])),
        "swap back": torch.equal(collectives.swap_halves_back(mirror, group), x),
        "float32 gradient": reduced.dtype
        == (dtype if p == 1 or dtype.itemsize > 2 else torch.float)
        and torch.equal(reduced[0].double(), total * torch.arange(2 * p).view(p, 2)[rank].double()),
    }


def _inner_products(group, name) -> tuple[float, float]:
    """<f(x), y> and <x, f'(y)> summed over ranks: equal if the backward is the adjoint of f."""
    p = group.size()
    torch.manual_seed(group.rank())
    x = torch.randn(5 if name in SWAPS else 2 * p, 3, dtype=torch.float64)
    if name == "transpose_blocks":
        x = torch.randn(p, 3, dtype=torch.float64)
    x.requires_grad_()
    output = getattr(collectives, name)(x, group)
    y = torch.randn_like(output)
    (grad,) = torch.autograd.grad(output, x, y)
    products = torch.stack(((output * y).sum(), (x * grad).sum())).detach()
    dist.all_reduce(products, group=group)
    return tuple(products.tolist())


def _counts(group, _) -> dict[str, int]:
    p = group.size()
    x = torch.zeros(4 * p, 3)  # 48 p bytes
    half = x.bfloat16()
    with count_communication() as count:
        collectives.all_gather(x, group)
        collectives.reduce_scatter(x, group)
        collectives.reduce_gradient_async(half, group).wait()
        collectives.all_to_all(x.view(p, 4, 3), group)
        collectives.ring_exchange_async(half, group).wait()
    collectives.all_gather(x, group)  # outside: not counted
    return dict(count.sent_bytes)


SWAPS = ("swap_halves", "swap_halves_back")
DUALS = ("gather_sequence", "scatter_sequence", "transpose_blocks", *SWAPS)


def _run(group, case):
    job, argument = case
    return job(group, argument)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_collectives_deliver_adjoint_and_counted(p):
    """One spawn: arrivals in four dtypes, the adjoint identity, and bytes by hand."""
    cases = {str(dtype): (_arrivals, dtype) for dtype in DTYPES} | {"counts": (_counts, None)}
    if p > 1:
        cases |= {name: (_inner_products, name) for name in DUALS}
    results = run_ranks(p, _run, cases)
    for dtype in DTYPES:
        for rank, found in enumerate(results[str(dtype)]):
            assert all(found.values()), (dtype, rank, found)
    by_hand = {
        "all_gather": (p - 1) * 48 * p,
        "reduce_scatter": 2 * (p - 1) * 48,
        "all_to_all": (p - 1) * 48,
        "send": 24 * p,
    }
    for counts in results["counts"]:
        assert counts == (by_hand if p > 1 else {})  # one rank communicates nothing
    for name in set(DUALS) & set(results):
        for left, right in results[name]:
            assert left == pytest.approx(right, rel=1e-12), name


def _fail_on_last(group, message):
    if group.rank() == group.size() - 1:
        raise RuntimeError(message)
    collectives.all_gather(torch.zeros(1), group)


def test_harness_names_the_case_that_failed():
    with pytest.raises(CaseFailedError, match=r"case 'bad' on rank 1 of 2.*\n(.*\n)*.*it broke"):
        run_ranks(2, _fail_on_last, {"bad": "it broke"}, timeout_seconds=60)


def _fail_if_told(group, message):
    if message:
        raise RuntimeError(message)
    return group.rank()


def test_harness_runs_every_case_though_one_raises():
    found = run_every_case(2, _fail_if_told, {"bad": "it broke", "good": ""}, timeout_seconds=60)
    assert found["good"] == [0, 1]
    assert "on rank 0:" in found["bad"] and "RuntimeError: it broke" in found["bad"]


def _sleep(group, seconds):
    time.sleep(seconds)


def test_harness_says_of_every_case_that_ranks_did_not_finish():
    found = run_every_case(2, _sleep, {"one": 60, "two": 60}, timeout_seconds=0.1)
    assert set(found) == {"one", "two"} and "did not finish" in found["two"]


def _begun(group, step):
    """What is counted on this rank; step 1: the last rank begins one more.

    A swap of halves has no part for the middle one of an odd number of ranks.
    """
    before = transport.num_begun(group)
    x = torch.zeros(2 * group.size())
    collectives.all_gather(x, group)
    collectives.swap_halves(x, group)
    dist.all_reduce(x, group=group)  # as Megatron does
    if step and group.rank() == group.size() - 1:
        works.extend(transport.all_gather(torch.empty(len(x) * group.size()), x, group))
    return transport.num_begun(group) - before


works: list = []


@pytest.mark.parametrize("p", [2, 3])
def test_ranks_that_are_at_the_same_place_have_begun_as_many_communications(p):
    found = run_ranks(p, _begun, {"together": 0, "apart": 1}, timeout_seconds=60)
    together = 3 if p == 2 else 2
    assert found["together"] == [together] * p
    assert found["apart"] == [together] * (p - 1) + [together + 1]


@pytest.mark.parametrize("counted", [0, 1, 2])
def test_messages_count_once_however_the_group_counts_them(counted, monkeypatch):
    """Of a ring exchange's two: gloo counts both; NCCL as many as its version likes."""
    group = SimpleNamespace(group_name=f"counts {counted}", size=lambda: 2)
    own = Counter()

    def exchange(operations):
        own[group.group_name] += counted
        return []

    monkeypatch.setattr(transport, "_num_counted", lambda group: own[group.group_name])
    monkeypatch.setattr(dist, "P2POp", lambda *args: args)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(dist, "batch_isend_irecv", exchange)
    for _ in range(3):
        transport.exchange(torch.empty(2), torch.zeros(2), group, to=1, source=1)
    assert transport.num_begun(group) == 3


def test_a_backend_that_counts_nothing_is_asked_once(monkeypatch):
    """Asked of every message it would answer with an error each time."""
    asked = []

    def none():
        asked.append(1)
        raise RuntimeError("Backend new does not support getSequenceNumberForGroup")

    group = SimpleNamespace(group_name="without a count", _get_sequence_number_for_group=none)
    monkeypatch.setattr(dist, "get_backend", lambda group: "new")
    monkeypatch.setattr(transport, "_without_count", {"fake"})
    assert [transport.num_begun(group) for _ in range(3)] == [0, 0, 0] and len(asked) == 1
