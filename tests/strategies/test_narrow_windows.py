"""A narrow window: ranks send each other the keys that it leaves, chunks lie as they are.

On the fake process group, which moves nothing; results are those of test_parity.py.
"""

from __future__ import annotations

import functools
from dataclasses import astuple

import pytest
import torch

from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.packing.work import keys_moved, scores_per_rank
from megatron_paradyse.simulator.run import ranks_that_differ
from megatron_paradyse.strategies import transport
from megatron_paradyse.strategies.accounting import operation_costs, packed_attention_sent
from megatron_paradyse.strategies.blocks import balanced_spans, plan_blocks, ring_spans
from megatron_paradyse.strategies.contract import Microbatch
from megatron_paradyse.strategies.sizes import is_narrow
from tests.strategies.cases import AttentionCase
from tests.strategies.fake_ranks import measure_rank, on_fake_ranks, sizes_of

RINGS = ("megatron_cz", "metp", "colossal_z")
S = 96


def case_of(strategy: str, p: int, window: int | None) -> AttentionCase:
    return AttentionCase(
        strategy, p, "causal", n=8, g=8, d=16, h=32, s=S, b=2, window=window, dtype=torch.bfloat16
    )


@functools.cache
def by_rank(case: AttentionCase) -> list:
    return on_fake_ranks(case, measure_rank, range(case.p))


@pytest.mark.parametrize("strategy", RINGS)
@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("window", [1, 2, 12, S // 4])
def test_ranks_send_what_the_window_leaves(strategy, p, window):
    """The keys of one document in contiguous chunks that queries elsewhere see, and no x."""
    case = case_of(strategy, p, window)
    moved = keys_moved(contiguous((S,), p), causal=True, window=window)
    sent = [(m.forward_sent_bytes, m.backward_sent_bytes) for m in by_rank(case)]
    assert sent == [
        packed_attention_sent(
            case.strategy,
            sizes_of(case),
            keys_sent=case.b * sum(moved[rank]),
            keys_received=case.b * sum(line[rank] for line in moved),
        )
        for rank in range(p)
    ]
    whole_ring = operation_costs(strategy, "attention", sizes_of(case))
    assert max(sent) < (whole_ring.forward_sent_bytes, whole_ring.backward_sent_bytes)


@pytest.mark.parametrize("strategy", RINGS)
@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("window", [1, 2, 12, S // 4])
def test_no_rank_needs_more_than_those_that_are_simulated(strategy, p, window):
    measured = list(map(astuple, by_rank(case_of(strategy, p, window))))
    stand = ranks_that_differ(strategy, "attention", p=p, causal=True, narrow=True)
    most = [max(of_ranks) for of_ranks in zip(*(measured[rank] for rank in stand), strict=True)]
    assert most == [max(of_ranks) for of_ranks in zip(*measured, strict=True)]


@pytest.mark.parametrize("strategy", RINGS)
def test_a_wide_window_leaves_the_ring_as_it_is(strategy):
    case = case_of(strategy, 4, 3 * S // 8 + 1)
    assert is_narrow(case.window - 1, S, 4)
    costs = operation_costs(strategy, "attention", sizes_of(case))
    for quantity in ("forward_sent_bytes", "backward_sent_bytes"):
        found = max(getattr(measured, quantity) for measured in by_rank(case))
        assert found == getattr(costs, quantity)


@pytest.mark.parametrize("window", [1, 2, 13, 14, 24])
def test_ranks_take_as_many_steps_as_the_window_reaches_back(window, monkeypatch):
    """Of keys and values there and back again, and of their gradients: also ranks without part."""
    begun, exchange = [], transport.exchange

    def counted(*buffers, **ranks):
        begun.append(ranks)
        return exchange(*buffers, **ranks)

    monkeypatch.setattr(transport, "exchange", counted)
    by_rank.cache_clear()
    p, size = 8, S // 8
    by_rank(case_of("megatron_cz", p, window))
    assert len(begun) == p * 3 * -(-(window - 1) // size)


def test_score_rows_have_columns_for_the_keys_that_come():
    """Of 4 ranks: the own quarter of the keys and those of the window before it, or all."""
    kept = {w: max(m.kept_bytes for m in by_rank(case_of("colossal_z", 4, w))) for w in (9, 17, 96)}
    rows = S // 4 * 2 * 8 * torch.bfloat16.itemsize  # b = 2, n = 8
    assert kept[17] - kept[9] == rows * 8
    assert kept[96] - kept[9] == rows * (S - S // 4 - 8)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("window", range(1, S + 2, 5))
def test_no_rank_has_more_scores_than_with_swapped_halves(p, window):
    """Whichever of the two a window gets."""
    microbatch, shape = Microbatch(S, 1), case_of("megatron_cz", p, window).shape

    def fullest(spans):
        return max(
            sum(b.num_scores for k in spans for b in plan_blocks(q, k, None, 1, True, window))
            for q in spans
        )

    spans = ring_spans(shape, microbatch, p)
    swapped = tuple(balanced_spans(microbatch, p, rank) for rank in range(p))
    assert fullest(spans) <= fullest(swapped)
    assert (spans == swapped) == (not is_narrow(window, S, p))
    if is_narrow(window, S, p):
        assert fullest(spans) == max(
            scores_per_rank(contiguous((S,), p), causal=True, window=window)
        )
