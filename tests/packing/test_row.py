"""A packed row's positions, pieces and attention work."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_paradyse.packing.row import Row, contiguous, of_each
from megatron_paradyse.packing.work import imbalance, keys_received, scores_per_rank

ZIGZAG = Row((6, 2), (((0, 2), (4, 6)), ((2, 4), (6, 8))))


def test_documents_follow_each_other():
    assert contiguous((3, 5, 1), 4).documents == ((0, 3), (3, 8), (8, 9))


def test_padding_fills_up_to_the_alignment():
    row = contiguous((3, 5, 1), 4, alignment=16)
    assert (row.seq_length, row.num_tokens) == (16, 9)


def test_pieces_are_counted_inside_their_document():
    assert ZIGZAG.pieces == (((0, 0, 2), (0, 4, 6)), ((0, 2, 4), (1, 0, 2)))


def test_places_count_from_the_start_of_each_document():
    row = Row((5, 2), (((0, 2), (5, 7)), ((2, 5), (7, 8))))
    assert row.places().tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert row.places(by_rows=True).tolist() == [0, 1, 0, 1, 2, 3, 4, 0]
    assert row.places() is row.places()


def test_rows_that_follow_hold_the_next_token_of_the_document():
    assert ZIGZAG.following().tolist() == [1, 4, 3, -1, 5, 2, 7, -1]
    row = Row((5, 1), (((0, 2), (5, 7)), ((2, 5), (7, 8))))  # with padding
    assert row.following().tolist() == [1, 4, -1, -1, 5, 6, -1, -1]


def test_rows_are_numbered_by_their_documents():
    assert ZIGZAG.numbers().tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    row = Row((5, 1), (((0, 2), (5, 7)), ((2, 5), (7, 8))))  # with padding
    assert row.numbers().tolist() == [0, 0, 1, 2, 0, 0, 0, 2]


@pytest.mark.parametrize("row", [ZIGZAG, contiguous((3, 5, 1), 4), contiguous((7,), 2)])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), *((True, w) for w in (1, 2, 3, 7))]
)
def test_scores_are_those_counted_one_by_one(row, causal, window):
    document = {
        position: number
        for number, (start, stop) in enumerate(row.documents)
        for position in range(start, stop)
    }
    counted = [
        sum(
            document[q] == document[k]
            and (k <= q or not causal)
            and (window is None or q - k < window)
            for start, stop in shard
            for q, k in itertools.product(range(start, stop), document)
            if q in document
        )
        for shard in row.shards
    ]
    assert scores_per_rank(row, causal=causal, window=window) == counted


def test_a_zigzag_document_alone_is_even():
    assert imbalance(Row((8,), (((0, 2), (6, 8)), ((2, 4), (4, 6)))), causal=True) == 1.0


def test_ranges_that_touch_are_one():
    assert Row((8,), (((0, 2), (6, 8)), ((2, 4), (4, 6)))).shards == (((0, 2), (6, 8)), ((2, 6),))
    assert Row((3, 1), (((2, 4), (0, 1), (1, 2)),)).shards == (((2, 4), (0, 2)),)


def test_ranks_receive_the_rest_of_their_documents_only():
    assert keys_received(ZIGZAG) == [2, 4]


@pytest.mark.parametrize(
    "shards", [(((0, 2),), ((1, 3),)), (((0, 2),), ((3, 5),)), (((0, 3),), ((3, 4),))]
)
def test_every_position_is_held_once_and_evenly(shards):
    with pytest.raises(AssertionError):
        Row((2,), shards)


def test_messages_tell_whose_tokens_those_of_a_wide_row_are():
    wide = replace(contiguous((8,), 4), groups=2)
    told = [f"s={row.group_length}{of_each(row)}" for row in (ZIGZAG, wide)]
    assert told == [f"s={ZIGZAG.seq_length}", "s=4 of each of 2 replicas"]
