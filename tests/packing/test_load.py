"""What costs depend on, counted another way."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random
from collections import Counter

import pytest

from megatron_paradyse.packing.load import (
    fullest_buffers,
    load_of,
    load_of_one,
    rounded_up,
)
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.packing.work import keys_at_once, scores_per_rank
from megatron_paradyse.strategies.blocks import contiguous_spans, plan_blocks
from megatron_paradyse.strategies.routes import _steps
from megatron_paradyse.strategies.row_sizes import RowSizes
from tests.packing.rows import keys_needed, random_row, zigzag


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
        needed = [len(keys_needed(row, rank, causal=causal)) for rank in range(p)]
        assert load.keys_received == max(needed)
        assert load.documents == len(row.lengths)
        holders = [{number for number, _, _ in pieces} for pieces in row.pieces]
        shared = [sum(bool(mine & other) for other in holders) for mine in holders]
        assert load.peers == max(max(shared) - 1, 0)
        held = [len({number for number, _, _ in pieces}) for pieces in row.pieces]
        assert load.fullest_documents == max(held)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_buffers_are_no_smaller_than_blocks_and_steps_of_strategies_are(p, causal):
    rng = random.Random(p)
    for _ in range(30):
        row = random_row(rng, p)
        buffers, microbatch = load_of(row, causal=causal).buffers, microbatch_of(row)
        alone = row.lengths == (row.seq_length,)
        assert buffers.longest == (0 if alone else max(row.lengths))
        spans = tuple(contiguous_spans(microbatch, p, rank) for rank in range(p))
        mask = (microbatch.documents, 1, causal, None)
        needed = [len(keys_needed(row, rank, causal=causal)) for rank in range(p)]
        assert buffers.fewest_keys == min(needed)
        assert buffers.pieces == max(map(len, row.pieces))
        for rank, own in enumerate(spans):
            for block in plan_blocks(own, own, *mask):
                assert block.q_rows[1] - block.q_rows[0] <= buffers.held
            tokens = [0] * len(row.lengths)
            for number, start, stop in row.pieces[rank]:
                tokens[number] += stop - start
                assert stop - start <= buffers.piece
            assert max(tokens) <= buffers.held
            steps = [(0, 0)] + [
                (step.num_received, sum(b - a for a, b in step.rows))
                for step in _steps(spans, rank, p - 1, *mask)
            ]
            assert max(sent for _, sent in steps) <= buffers.keys_sent
            most = buffers.moments
            for i, ((used, went), (comes, sent)) in enumerate(itertools.pairwise([*steps, (0, 0)])):
                assert used + comes + sent <= buffers.keys_at_once
                assert used + comes + went <= buffers.keys_at_once  # gradients, a step later
                copied = sent if sent < row.seq_length // p else 0
                assert used + comes + copied <= (most.keys_in_use if i else most.keys_first)
                assert used + went <= most.gradients_sent
                if 0 < i < len(steps) - 1:
                    assert comes + used + went <= most.gradients_in_use
        assert max(keys_at_once(row, causal=causal)) == buffers.keys_at_once


@pytest.mark.parametrize("causal", [True, False])
def test_one_document_spread_evenly_is_the_single_document(causal):
    for p in (1, 2, 4, 8):
        load = load_of(zigzag((48 * p,), p), causal=causal)
        assert load == dataclasses.replace(
            load_of_one(48 * p, p, causal=causal), in_order=p == 1, buffers=load.buffers
        )


def test_documents_cross_ranks_or_do_not():
    assert not load_of(contiguous((4, 4, 4, 4), 4), causal=True).crosses
    assert load_of(contiguous((4, 5, 3, 4), 4), causal=True).crosses


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", [None, 24])
def test_rounding_makes_nothing_less_and_leaves_one_document_alone(window, groups):
    rng = random.Random(0)
    for _ in range(50):
        row = dataclasses.replace(random_row(rng, 4, longest=200, most=8), groups=groups)
        load = load_of(row, causal=True, window=window)
        rounded = rounded_up(load, alignment=64, causal=True, window=window)
        for exact, up in ((load, rounded), (load.within, rounded.within))[: 2 if window else 1]:
            for field in dataclasses.fields(load)[:-2]:
                assert getattr(up, field.name) >= getattr(exact, field.name)
            of_exact, of_up = (dataclasses.asdict(one.buffers) for one in (exact, up))
            assert of_up.pop("fewest_keys") <= of_exact.pop("fewest_keys")
            assert all(map(operator.ge, of_up.values(), of_exact.values()))
            if load.seq_length % 64 == 0:
                assert up.scores <= 1.05 * exact.scores + 1
            assert up.crosses == exact.crosses
        assert (rounded.within is None) == (window is None)
    one = load_of_one(128, 4, causal=True, window=window)
    assert rounded_up(one, alignment=64, causal=True, window=window) == one


@pytest.mark.parametrize("lengths", [(7, 505), (505, 7), (512,)])
def test_no_part_is_rounded_up_to_a_whole_beside_which_no_room_is_held(lengths):
    load = load_of(contiguous(lengths, 4), causal=True, window=16)
    rounded = rounded_up(load, alignment=64, causal=True, window=16)
    for exact, up in ((load, rounded), (load.within, rounded.within)):
        for name in ("longest", "call"):
            assert (getattr(up.buffers, name) < 512) == (getattr(exact.buffers, name) < 512)
        for name in ("piece", "piece_beside", "held", "crossing", "call_here", "call_beside"):
            assert (getattr(up.buffers, name) < 128) == (getattr(exact.buffers, name) < 128)


def test_of_a_doubling_sixteen_sizes_stand_for_all():
    """Of the fewest keys those below, of all else those above: else like rows share no plan."""
    one = load_of_one(1 << 16, 4, causal=True)
    ups, downs = set(), set()
    for keys in range(1 << 13, 1 << 14, 7):
        buffers = RowSizes(held=keys, fewest_keys=keys)
        load = dataclasses.replace(one, keys_received=keys, buffers=buffers)
        found = rounded_up(load, alignment=64, causal=True, window=None)
        assert found.buffers.fewest_keys <= keys <= min(found.keys_received, found.buffers.held)
        ups |= {(found.keys_received, found.buffers.held)}
        downs |= {found.buffers.fewest_keys}
    assert len(downs) in (16, 17) and 16 <= len(ups) <= 33  # two kinds of units


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_no_row_that_gets_as_many_keys_holds_more_in_any_buffer(groups):
    rng = random.Random(groups)
    for _ in range(40):
        row = dataclasses.replace(random_row(rng, 4, longest=200, most=8), groups=groups)
        load = load_of(row, causal=rng.random() < 0.5)
        most = fullest_buffers(load.seq_length, load.p, load.keys_received)
        for name in ("longest", "piece", "piece_beside", "held", "keys_sent", "keys_at_once"):
            assert getattr(load.buffers, name) <= getattr(most, name), name


@pytest.mark.parametrize("p", [4, 8])
def test_some_row_holds_what_the_fullest_buffers_are_of(p):
    """A document in one chunk a rank: of three chunks one is used, one comes and one is sent."""
    load = load_of(contiguous((64 * p,), p), causal=False)
    most = fullest_buffers(64 * p, p, load.keys_received)
    assert load.buffers.keys_at_once == most.keys_at_once == 3 * 64
    assert (load.buffers.piece, load.buffers.held, load.buffers.keys_sent) == (64,) * 3
    inside = load_of(contiguous((16,) * 4 * p, p), causal=True)
    assert not inside.crosses and fullest_buffers(64 * p, p, 0).keys_at_once == 0


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 24)])
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_keys_at_once_are_those_of_one_step_and_of_the_next(p, causal, window):
    """Counted one by one: in step i rank r has those of rank r - i, while the next come.

    A step later, their gradients, while those of what was sent in the step come.
    """
    rng = random.Random(p)
    for _ in range(20):
        row = random_row(rng, p)
        held = [{(n, i) for n, a, b in of for i in range(a, b)} for of in row.pieces]
        seen = {"causal": causal, "window": window or 1 << 40}
        needed = [keys_needed(row, rank, **seen) for rank in range(p)]

        def sent(source, to, held=held, needed=needed):
            return len(held[source % p] & needed[to % p])

        assert keys_at_once(row, causal=causal, window=window) == [
            max(
                sent(r - i, r) + sent(r - i - 1, r) + sent(r, r + i + j)
                for i in range(p)
                for j in (0, 1)
            )
            for r in range(p)
        ]


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 24)])
def test_loads_of_wide_rows_are_of_the_group_that_has_most(causal, window):
    rng = random.Random(0)
    for _ in range(20):
        wide = dataclasses.replace(random_row(rng, 4, longest=200, most=8), groups=2)
        load = load_of(wide, causal=causal, window=window)
        assert (load.seq_length, load.p, load.groups) == (wide.seq_length // 2, 2, 2)
        starts = [[start for shard in wide.shards[i : i + 2] for start, _ in shard] for i in (0, 2)]
        assert load.in_order == (starts == list(map(sorted, starts)))
        tokens = Counter(
            (group, n)
            for group in range(2)
            for pieces in wide.pieces[2 * group : 2 * group + 2]
            for n, start, stop in pieces
            for _ in range(start, stop)
        )
        alone = wide.lengths == (wide.seq_length,)
        assert load.buffers.longest == (0 if alone else max(tokens.values()))
        for one, seen in ((load, 1 << 40), (load.within, window))[: 2 if window else 1]:
            masked = {"causal": causal, "window": seen}
            needed = [len(keys_needed(wide.by_groups, group, **masked)) for group in range(2)]
            assert one.group_keys == max(needed)
            scores = scores_per_rank(wide, **masked)
            assert one.scores == max(sum(scores[:2]), sum(scores[2:]))
