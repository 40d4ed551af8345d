"""Long documents over several replicas: which, in what rows, and that nothing is lost."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_paradyse.data.distributions import draw_lengths
from megatron_paradyse.packing.load import load_of
from megatron_paradyse.packing.pack import Costs, Grid, flops_costs, pack
from megatron_paradyse.packing.placement import place
from megatron_paradyse.packing.wide import pack_wide
from megatron_paradyse.packing.work import keys_received, scores_per_rank

GRID = Grid(p=2, hidden_size=64, num_replicas=4, alignment=4, spread=4)


@given(
    lengths=st.lists(st.integers(1, 900), min_size=8, max_size=80),
    tokens=st.one_of(st.none(), st.integers(1, 4000)),
    replicas=st.sampled_from([(2, 2), (4, 2), (4, 4)]),
    multiple_of=st.integers(1, 3),
    longest=st.one_of(st.none(), st.integers(1, 900)),
    stages=st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_every_document_is_once_in_rows_at_the_same_places(
    lengths, tokens, replicas, multiple_of, longest, stages
):
    num_replicas, spread = replicas
    lengths = lengths[: len(lengths) // num_replicas * num_replicas]
    grid = Grid(
        p=2, hidden_size=64, num_replicas=num_replicas, alignment=4, multiple_of=multiple_of,
        spread=spread, stages=stages,
    )  # fmt: skip
    costs = flops_costs(grid)
    if longest is not None:
        costs = replace(costs, fits=lambda tokens: tokens <= longest)
    packing = pack_wide(lengths, tokens, grid, costs)
    found = []
    for first in range(0, num_replicas, spread):
        team = packing.replicas[first : first + spread]
        for place_of, column in enumerate(itertools.zip_longest(*team)):
            wide = [made for made in column if made.row is not None and made.row.groups > 1]
            if wide:
                assert len(wide) == spread and len(set(wide)) == 1
                assert wide[0].row.groups == spread and wide[0].row.p == 2 * spread
                assert all(made.row is not None for made in team[0][: place_of + 1])
                column = wide[:1]
            for made in column:
                found += made.documents
                of_row = tuple(lengths[number] for number in made.documents)
                assert made.row is None or made.row.lengths == of_row
                most = tokens or packing.tokens
                budget = most * (made.row.groups if made.row else 1)
                assert len(of_row) == 1 or sum(of_row) <= budget or tokens is None
    assert sorted(found) == list(range(len(lengths)))
    rounds = len(packing.replicas[0])
    assert all(len(replica) == rounds for replica in packing.replicas)
    assert rounds % multiple_of == 0 or rounds == len(lengths) // num_replicas
    times = [[made.seconds for made in replica] for replica in packing.replicas]
    last = max(map(sum, times)) + (stages - 1) * max(map(max, times))  # of stages that are alike
    assert packing.seconds == pytest.approx(last / stages)


def test_a_long_document_that_keeps_others_waiting_goes_wide():
    lengths = [4000] + [100] * 15
    packing = pack_wide(lengths, 512, GRID, flops_costs(GRID))
    alone = pack(lengths, 512, replace(GRID, spread=1), flops_costs(GRID))
    first = packing.replicas[0][0]
    assert first.row.groups == 4 and 0 in first.documents
    assert packing.seconds < alone.seconds / 3


def test_nothing_goes_wide_where_nobody_waits():
    lengths = [100] * 64
    packing = pack_wide(lengths, 512, GRID, flops_costs(GRID))
    assert packing == pack(lengths, 512, replace(GRID, spread=1), flops_costs(GRID))


@pytest.mark.parametrize(("share", "goes"), [(0.52, True), (0.59, False)])
def test_more_documents_go_wide_for_a_gain_that_is_not_small(share, goes):
    """800 seconds alone; as wide rows the first four take so much of 800, beside 300 of others."""
    costs = Costs(lambda row: row.num_tokens * (share if row.groups > 1 else 1.0), float)
    packing = pack_wide([500] + [100] * 15, 100, GRID, costs)
    assert packing.seconds == pytest.approx(800 * share + 300 if goes else 800)


def test_replicas_of_longer_wide_rows_get_the_shorter_of_the_others():
    """Of two pairs of replicas one has 400 seconds of wide rows to do, the other one 200."""
    costs = Costs(lambda row: row.num_tokens / row.groups, float, fits=lambda tokens: tokens < 200)
    packing = pack_wide([600, 200, 200, 200, *[100, 20] * 4], 1, replace(GRID, spread=2), costs)
    times = [sorted(made.seconds for made in replica) for replica in packing.replicas]
    assert times == [[20, 20, 100, 300]] * 2 + [[100, 100, 100, 100]] * 2
    assert packing.seconds == 440


def test_what_does_not_fit_on_a_replica_goes_wide_though_it_be_slower():
    work = flops_costs(GRID)
    costs = Costs(
        lambda row: (1e9 if row.groups > 1 else 1.0) * work.row(row),
        work.alone,
        fits=lambda tokens: tokens <= 300,
    )
    wide = pack_wide([350, 340] + [300] * 14, 64, GRID, costs)
    assert {n for made in wide.replicas[0] if made.row for n in made.documents} >= {0, 1}
    narrow = pack_wide([300] * 16, 64, GRID, costs)
    assert all(made.row is None for replica in narrow.replicas for made in replica)


def test_where_nothing_fits_anywhere_the_documents_are_trained_all_the_same():
    costs = flops_costs(GRID)
    costs = Costs(lambda row: None, costs.alone, fits=lambda tokens: False)
    packing = pack_wide([50] * 8, None, GRID, costs)
    microbatches = itertools.chain(*packing.replicas)
    assert {n for made in microbatches for n in made.documents} == set(range(8))
    pair = pack_wide([50, 60], None, replace(GRID, num_replicas=2, spread=2), costs)
    assert all(made.row.groups == 2 for replica in pair.replicas for made in replica)


@pytest.mark.parametrize("distribution", ["githubcode", "grch38"])
def test_replicas_end_sooner_on_published_lengths(distribution):
    """By FLOPs, on 8 replicas: never later, with one global batch of few documents much sooner."""
    grid = replace(GRID, p=8, num_replicas=8, spread=8, alignment=16, hidden_size=4096)
    for count, most in ((32, 0.6), (256, 1.0)):
        lengths = draw_lengths(distribution, count, 1.0, 7).tolist()
        wide = pack_wide(lengths, 1 << 16, grid, flops_costs(grid))
        alone = pack(lengths, 1 << 16, replace(grid, spread=1), flops_costs(grid))
        assert wide.seconds <= most * alone.seconds


def test_a_wide_rows_load_is_of_its_fullest_group():
    row = replace(place([40, 9, 5], 4, causal=True, alignment=8), groups=2)
    load = load_of(row, causal=True)
    scores = scores_per_rank(row, causal=True)
    assert (load.seq_length, load.p, load.groups) == (row.seq_length // 2, 2, 2)
    assert load.scores == max(sum(scores[:2]), sum(scores[2:]))
    assert load.fullest_scores == max(scores)
    assert load.keys_received == max(keys_received(row, causal=True))
