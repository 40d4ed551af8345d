"""What a sliding window leaves of a row, counted another way."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_paradyse.packing.load import (
    load_of,
    load_of_one,
    unpacked,
)
from megatron_paradyse.packing.placement import place
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.packing.work import keys_at_once, keys_received, scores_per_rank
from megatron_paradyse.strategies.blocks import Span, contiguous_spans, plan_blocks, ring_spans
from megatron_paradyse.strategies.contract import AttentionShape, Microbatch
from megatron_paradyse.strategies.joined_blocks import join_documents
from megatron_paradyse.strategies.routes import _steps
from megatron_paradyse.strategies.sizes import DOCUMENT_ROWS, is_narrow
from tests.packing.rows import keys_needed, random_row, zigzag


@given(seed=st.integers(0, 1 << 30), p=st.sampled_from([1, 2, 3, 4, 8]), window=st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_within_a_window_a_load_is_what_blocks_and_routes_of_strategies_are(seed, p, window):
    """Scores, keys and ranks that exchange, besides one by one; all else is as without it."""
    row = random_row(random.Random(seed), p)
    load = load_of(row, causal=True, window=window)
    assert dataclasses.replace(load, within=None) == load_of(row, causal=True)
    microbatch = microbatch_of(row)
    spans = tuple(contiguous_spans(microbatch, p, rank) for rank in range(p))
    mask = (microbatch.documents, 1, True, window)
    scores = [
        sum(block.num_scores for keys in spans for block in plan_blocks(own, keys, *mask))
        for own in spans
    ]
    steps = [_steps(spans, rank, p - 1, *mask) for rank in range(p)]
    received = [sum(step.num_received for step in of_rank) for of_rank in steps]
    needed = [keys_needed(row, rank, causal=True, window=window) for rank in range(p)]
    assert received == [len(keys) for keys in needed]
    assert received == keys_received(row, causal=True, window=window)
    assert scores == scores_per_rank(row, causal=True, window=window)
    peers = [
        {step.to for step in of_rank if step.rows}
        | {step.source for step in of_rank if step.num_received}
        for of_rank in steps
    ]
    assert load.within == dataclasses.replace(
        load,
        scores=sum(scores),
        fullest_scores=max(scores),
        keys_received=max(received),
        peers=max(map(len, peers)),
        buffers=load.within.buffers,
        within=None,
    )


@given(seed=st.integers(0, 1 << 30), p=st.sampled_from([1, 2, 4, 8]), window=st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_buffers_within_a_window_are_no_smaller_than_calls_and_steps_of_strategies_are(
    seed, p, window
):
    rng = random.Random(seed)
    row = random_row(rng, p)
    if rng.random() < 0.5:
        row = place(row.lengths, p, causal=True, alignment=row.seq_length, window=window)
    holds_calls_and_steps(row, window)


def test_documents_join_in_calls_over_keys_of_each_of_several_ranks():
    """Of documents that are longer than the window."""
    row = place((66, 99, 66, 19), 4, causal=True, alignment=256, window=33)
    holds_calls_and_steps(row, 33)


def holds_calls_and_steps(row, window):
    p, buffers = row.p, load_of(row, causal=True, window=window).within.buffers
    microbatch = microbatch_of(row)
    mask = (microbatch.documents, 1, True, window)
    spans = tuple(contiguous_spans(microbatch, p, rank) for rank in range(p))
    whole = (Span(0, 0, row.seq_length),)
    calls = join_documents(plan_blocks(whole, whole, *mask))
    assert buffers.call == max(map(num_queries, calls))
    assert buffers.call_rows == max(map(summed, calls))
    here = [join_documents(plan_blocks(own, own, *mask)) for own in spans]
    assert buffers.call_here == max(num_queries(call) for of in here for call in of)
    assert buffers.call_here_rows >= max(summed(call) for of in here for call in of)
    for rank, own in enumerate(spans):
        most = max(map(num_queries, here[rank]), default=0)
        assert most <= buffers.call_beside or most == row.seq_length // p
        steps = _steps(spans, rank, p - 1, *mask)
        sent = max((sum(b - a for a, b in step.rows) for step in steps), default=0)
        assert sent <= buffers.keys_sent
        for step in steps:
            for call in join_documents(plan_blocks(own, step.spans, *mask)):
                assert num_queries(call) <= buffers.crossing
                assert summed(call) <= buffers.crossing_rows
        for number, start, stop in row.pieces[rank]:
            if sum(other == number for other, _, _ in row.pieces[rank]) > 1:
                assert stop - start <= buffers.held
    assert max(keys_at_once(row, causal=True, window=window)) == buffers.keys_at_once


def num_queries(block):
    return block.q_rows[1] - block.q_rows[0]


def summed(block):
    """Rows that a flash kernel's backward sums, as simulator/flash_kernel.py has them."""
    rows = num_queries(block)
    return rows + (len(block.parts) * DOCUMENT_ROWS if block.parts else -rows % DOCUMENT_ROWS)


@given(s=st.integers(1, 300), p=st.sampled_from([1, 2, 3, 4, 8]), window=st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_one_document_within_a_window_is_computed_and_goes_where_rings_say(s, p, window):
    """Within a narrow one in chunks as they are, to who sees it; else in halves, to every rank."""
    s *= p
    load = load_of_one(s, p, causal=True, window=window)
    assert dataclasses.replace(load, within=None) == load_of_one(s, p, causal=True)
    shape = AttentionShape(1, 1, 1, causal=True, softmax_scale=1.0, window=window)
    spans = ring_spans(shape, Microbatch(s, 1), p)
    scores = [
        sum(b.num_scores for keys in spans for b in plan_blocks(own, keys, None, 1, True, window))
        for own in spans
    ]
    within = dataclasses.replace(load, scores=sum(scores), fullest_scores=max(scores), within=None)
    if is_narrow(window, s, p):
        alone = load_of(contiguous((s,), p), causal=True, window=window).within
        exchanged = {name: getattr(alone, name) for name in ("keys_received", "peers")}
        within = dataclasses.replace(within, **exchanged)
    assert load.within == within


@pytest.mark.parametrize("window", [16, 300])
def test_a_row_of_one_document_is_that_document_alone_however_it_lies(window):
    row = zigzag((512,), 4)
    load = load_of(row, causal=True, window=window)
    one = load_of_one(512, 4, causal=True, window=window)
    assert load.within.keys_received != one.within.keys_received
    differs = {"in_order": False, "buffers": load.buffers}  # how the row lies
    in_chunks = load_of(contiguous((512,), 4), causal=True, window=window).within.buffers
    narrow = {"buffers": in_chunks if window == 16 else load.within.buffers}
    assert unpacked(load, window) == dataclasses.replace(
        one, **differs, within=dataclasses.replace(one.within, **differs | narrow)
    )
    without = load_of(row, causal=True)
    assert unpacked(without, None) == without
