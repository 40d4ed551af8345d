"""What costs depend on, counted another way."""

from __future__ import annotations

import dataclasses
import random

import pytest

from megatron_paradyse.packing.load import load_of, load_of_one, rounded_up
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.packing.work import scores_per_rank
from tests.packing.rows import random_row, zigzag


def keys_needed(row, rank, *, causal):
    """Tokens that the rank does not hold and its queries see, one by one."""
    mine = {(n, i) for n, start, stop in row.pieces[rank] for i in range(start, stop)}
    seen = {(n, key) for n, query in mine for key in range(query + 1 if causal else row.lengths[n])}
    return len(seen - mine)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_a_load_is_what_is_counted_one_by_one(p, causal):
    rng = random.Random(p)
    for _ in range(30):
        row = random_row(rng, p)
        load, scores = load_of(row, causal=causal), scores_per_rank(row, causal=causal)
        assert (load.seq_length, load.p) == (row.seq_length, p)
        assert (load.scores, load.fullest_scores) == (sum(scores), max(scores))
        rows = [i for shard in row.shards for start, stop in shard for i in range(start, stop)]
        assert load.in_order == (rows == list(range(row.seq_length)))
        needed = [keys_needed(row, rank, causal=causal) for rank in range(p)]
        assert load.keys_received == max(needed)
        assert load.documents == len(row.lengths)
        holders = [{number for number, _, _ in pieces} for pieces in row.pieces]
        shared = [sum(bool(mine & other) for other in holders) for mine in holders]
        assert load.peers == max(max(shared) - 1, 0)
        held = [len({number for number, _, _ in pieces}) for pieces in row.pieces]
        assert load.fullest_documents == max(held)


@pytest.mark.parametrize("causal", [True, False])
def test_one_document_spread_evenly_is_the_single_document(causal):
    for p in (1, 2, 4, 8):
        assert load_of(zigzag((48 * p,), p), causal=causal) == dataclasses.replace(
            load_of_one(48 * p, p, causal=causal), in_order=p == 1
        )


def test_documents_cross_ranks_or_do_not():
    assert not load_of(contiguous((4, 4, 4, 4), 4), causal=True).crosses
    assert load_of(contiguous((4, 5, 3, 4), 4), causal=True).crosses


def test_rounding_makes_nothing_less_and_leaves_one_document_alone():
    rng = random.Random(0)
    for _ in range(50):
        load = load_of(random_row(rng, 4, longest=200), causal=True)
        rounded = rounded_up(load, alignment=64, causal=True)
        for field in dataclasses.fields(load):
            assert getattr(rounded, field.name) >= getattr(load, field.name)
        if load.seq_length % 64 == 0:
            assert rounded.scores <= 1.05 * load.scores + 1
        assert rounded.crosses == load.crosses
    one = load_of_one(128, 4, causal=True)
    assert rounded_up(one, alignment=64, causal=True) == one
