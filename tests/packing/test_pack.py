"""Microbatches of a global batch: every document once, every replica as many."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_paradyse.data.distributions import draw_lengths
from megatron_paradyse.packing.groups import filled_up
from megatron_paradyse.packing.pack import Costs, Grid, Packing, flops_costs, pack
from megatron_paradyse.packing.work import scores_per_rank

GRID = Grid(p=4, hidden_size=64, num_replicas=2, alignment=8)


def documents_of(packing: Packing) -> list[int]:
    return [n for replica in packing.replicas for made in replica for n in made.documents]


@given(
    lengths=st.lists(st.integers(1, 900), min_size=8, max_size=80),
    tokens=st.one_of(st.none(), st.integers(1, 4000)),
    num_replicas=st.sampled_from([1, 2, 4]),
    multiple_of=st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_every_document_is_in_one_microbatch_of_equally_many(
    lengths, tokens, num_replicas, multiple_of
):
    lengths = lengths[: len(lengths) // num_replicas * num_replicas]
    grid = Grid(
        p=2, hidden_size=64, num_replicas=num_replicas, alignment=4, multiple_of=multiple_of
    )
    packing = pack(lengths, tokens, grid, flops_costs(grid))
    assert sorted(documents_of(packing)) == list(range(len(lengths)))
    assert len({len(replica) for replica in packing.replicas}) == 1
    most = len(lengths) // num_replicas
    assert len(packing.replicas[0]) % multiple_of == 0 or len(packing.replicas[0]) == most
    for made in itertools.chain(*packing.replicas):
        of_row = tuple(lengths[number] for number in made.documents)
        assert (made.row is None) == (len(of_row) == 1)
        assert made.row is None or made.row.lengths == of_row
        assert len(of_row) == 1 or sum(of_row) <= packing.tokens
    assert packing == pack(lengths, tokens, grid, flops_costs(grid))


def test_rows_are_halved_until_they_fit():
    costs = flops_costs(GRID)
    small = Costs(lambda row: costs.row(row) if row.seq_length <= 256 else None, costs.alone)
    packing = pack([60] * 64, 4096, GRID, small)
    rows = [made.row for made in itertools.chain(*packing.replicas)]
    assert max(row.seq_length for row in rows if row) <= 256
    assert sorted(documents_of(packing)) == list(range(64))


@pytest.mark.parametrize("num_documents", [4, 8])
def test_a_row_whose_halves_do_not_fit_is_cut_into_what_does(num_documents):
    """Rows of four and of eight fit, of two do not: every document is a microbatch."""
    costs = flops_costs(GRID)
    small = Costs(lambda row: None if len(row.lengths) == 2 else costs.row(row), costs.alone)
    grid = Grid(p=4, hidden_size=64, num_replicas=2, alignment=8, multiple_of=3)
    packing = pack([8] * num_documents, 8 * num_documents, grid, small)
    assert sorted(documents_of(packing)) == list(range(num_documents))
    assert [len(replica) for replica in packing.replicas] == [num_documents // 2] * 2


def test_the_budget_is_the_fastest_that_fits():
    """A microbatch costs 1, a token 1/1000, and more than 2,048 do not fit."""
    costs = Costs(
        lambda row: 1 + row.seq_length / 1000 if row.seq_length <= 2048 else None,
        lambda tokens: 1 + tokens / 1000,
    )
    packing = pack([50] * 400, None, GRID, costs)
    assert packing.tokens == 2048 and len(packing.replicas[0]) == 5


@pytest.mark.parametrize("distribution", ["githubcode", "grch38"])
@pytest.mark.parametrize("overhead", [0, 2000, 100_000])
def test_a_few_rows_tell_which_budget_is_fastest(distribution, overhead):
    """Of all powers of two, each tried whole, where a microbatch costs what so many tokens do."""
    lengths = draw_lengths(distribution, 512, 1.0, 3).tolist()
    flops = flops_costs(GRID)
    costs = Costs(
        lambda row: overhead + flops.row(row), lambda tokens: overhead + flops.alone(tokens)
    )
    best = min(pack(lengths, 1 << i, GRID, costs).seconds for i in range(8, 23))
    assert pack(lengths, None, GRID, costs).seconds <= 1.02 * best


def test_replicas_have_about_the_same_to_do():
    lengths = draw_lengths("githubcode", 512, 1.0, 3).tolist()
    packing = pack(lengths, 1 << 17, GRID, flops_costs(GRID))
    seconds = [sum(made.seconds for made in replica) for replica in packing.replicas]
    assert max(seconds) <= 1.05 * min(seconds)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_slowest_replica_ends_when_its_last_stage_does(stages):
    """Stages take even shares of a microbatch, each after the one before; the longest is first."""
    lengths = sorted(draw_lengths("githubcode", 64, 1.0, 3).tolist(), reverse=True)
    grid = replace(GRID, stages=stages)
    packing = pack(lengths, 1 << 13, grid, flops_costs(grid))
    ends = []
    for replica in packing.replicas:
        done = [0.0] * stages  # by each stage, so far
        for made in sorted(replica, key=lambda made: -made.seconds):
            before = 0.0
            for stage in range(stages):
                done[stage] = before = max(before, done[stage]) + made.seconds / stages
        ends.append(done[-1])
    assert packing.seconds == pytest.approx(max(ends))


def test_best_fit_fills_the_least_room():
    assert filled_up([7, 5, 3, 3, 1], 10) == [[0, 2], [1, 3, 4]]


@pytest.mark.parametrize(
    ("row_seconds", "microbatches"),
    [
        (lambda row: 1.0, [(0, 2), (1, 3, 4)]),  # the fewest
        (lambda row: len(row.lengths) * max(row.lengths), [(0,), (1,), (2, 3, 4)]),  # like lengths
    ],
    ids=["filled up", "like lengths"],
)
def test_of_two_ways_to_share_rows_the_faster_is_taken(row_seconds, microbatches):
    grid = Grid(p=1, hidden_size=64)
    packing = pack([7, 5, 3, 3, 1], 10, grid, Costs(row_seconds, lambda tokens: tokens))
    assert [made.documents for made in packing.replicas[0]] == microbatches


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 6)])
def test_flops_of_a_row_follow_its_fullest_rank(causal, window):
    grid = Grid(p=2, hidden_size=1, alignment=4, causal=causal, window=window)
    packing = pack([30, 20, 10, 4], 64, grid, flops_costs(grid))
    (made,) = packing.replicas[0]
    fullest = max(scores_per_rank(made.row, causal=causal, window=window))
    assert made.seconds == pytest.approx(32 + fullest / 6)


def test_the_work_of_a_document_is_what_its_window_leaves():
    assert Grid(p=2, hidden_size=1, window=2).work(5) == 5 + (1 + 4 * 2) / 6
