"""The staging transport is right, and every strategy uses its transport as NCCL needs it."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from megatron_paradyse.strategies import (
    base_name,
    collectives,
    recomputes,
    strategy_names,
    transport,
)
from megatron_paradyse.strategies.sizes import is_narrow
from tests.strategies.cases import FLOAT32_TOLERANCE, AttentionCase, MlpCase, can_run
from tests.strategies.deviations import combine
from tests.strategies.harness import run_ranks
from tests.strategies.layers import run_case
from tests.strategies.staging import staged


def _cases():
    for strategy, p in itertools.product(strategy_names(), (2, 3, 4)):
        n = 6 if p == 3 else 4
        attention = functools.partial(AttentionCase, strategy, p, n=n, bias=True, rope="half")
        yield attention("causal", g=n)
        yield attention("bidirectional", g=2, qk_norm="layernorm")
        yield attention("packed_causal", g=1, dropout=0.3)
        yield attention("padded_causal", g=2, window=13)
        yield attention("padded_causal", g=2, window=5)  # narrow
        yield MlpCase(strategy, p, gated=True, bias=True)
        yield MlpCase(f"{strategy}+recompute", p)
        yield AttentionCase(f"{strategy}+recompute", p, n=2 * n, g=2 * n, tile_rows=4)
        yield MlpCase(f"{strategy}+recompute", p, gated=True, bias=True, tile_rows=4)


CASES = {c.name: c for c in _cases() if isinstance(c, MlpCase) or can_run(c)}


def _run(group, case):
    if case is None:
        return _misuses(group)
    with staged() as staging:
        return run_case(group, case), staging.calls


def _misuses(group) -> dict[str, str | bool]:
    """What the staging transport says of buffers that are changed, dropped or read too early."""
    found: dict[str, str | bool] = {}
    with staged():
        x = torch.ones(4)
        pending = collectives.ring_exchange_async(x, group)
        x += 1
        found["changed"] = _error_of(pending.wait)
        into, ones = torch.zeros(4), torch.ones(4)
        works = transport.all_gather(torch.zeros(4 * group.size()), torch.ones(4), group)
        found["dropped"] = _error_of(works[0].wait)
        works = transport.exchange(
            into, ones, group,
            to=(group.rank() + 1) % group.size(), source=(group.rank() - 1) % group.size(),
        )  # fmt: skip
        found["unread"] = bool(into.isnan().all())
        works[0].wait()
        found["arrived"] = torch.equal(into, ones)
    return found


def _error_of(function) -> str:
    try:
        function()
    except AssertionError as error:
        return str(error)
    return ""


@functools.cache
def _results(p: int):
    cases = {name: case for name, case in CASES.items() if case.p == p}
    return run_ranks(p, _run, cases | {"misuses": None}, timeout_seconds=120)


@pytest.mark.parametrize("name", CASES)
def test_strategies_through_the_staging_transport_match_the_reference(name):
    """No buffer is read before it has arrived, nor changed or dropped while it is sent."""
    errors = combine([errors for errors, _ in _results(CASES[name].p)[name]])
    assert max(part.relative for part in errors.values()) <= FLOAT32_TOLERANCE, errors


@pytest.mark.parametrize("name", CASES)
def test_every_rank_communicates_in_the_same_order(name):
    """So that one NCCL communicator can run it all. With odd p the middle rank swaps no halves."""
    case = CASES[name]
    by_rank = [calls for _, calls in _results(case.p)[name]]
    assert all(by_rank)
    if not isinstance(case, MlpCase) and is_narrow(case.window, case.s, case.p):
        # What the ranks send differs in size, and may be nothing.
        by_rank = [[(name, dtype) for name, dtype, *_ in calls] for calls in by_rank]
        assert all(calls == by_rank[0] for calls in by_rank)
        return
    reference = by_rank[0]
    for rank, calls in enumerate(by_rank):
        if rank == case.p - 1 - rank:
            half = case.s // case.p - (case.s // case.p + 1) // 2
            swaps = _number_of_swaps(case)
            rest = [c for c in reference if not (c[0] == "exchange" and c[2][0] == half)]
            assert calls == rest and len(reference) - len(rest) == swaps
        else:
            assert calls == reference, f"rank {rank}"


def _number_of_swaps(case) -> int:
    """swap_halves of input and output, in both directions; +recompute runs the forward twice."""
    if isinstance(case, MlpCase) or not case.shape.causal:
        return 0
    directions = 3 if recomputes(case.strategy) else 2
    return 2 * directions if base_name(case.strategy) in ("megatron_cz", "metp") else 0


@pytest.mark.parametrize("p", [2, 4])
def test_staging_transport_notices_misuse(p):
    for found in _results(p)["misuses"]:
        assert found == {
            "changed": "a buffer changed while it was being sent",
            "dropped": "a buffer was dropped while it was being sent",
            "unread": True,
            "arrived": True,
        }
