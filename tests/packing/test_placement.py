"""Placements: every token once, even scores, few documents across ranks, little padding."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_paradyse.data.distributions import draw_lengths
from megatron_paradyse.packing.placement import EVEN, MOST_PADDING, place
from megatron_paradyse.packing.row import Row
from megatron_paradyse.packing.work import imbalance, keys_received, scores_per_rank

BUDGET = 1 << 18


def rows_of(distribution: str, budget: int) -> list[list[int]]:
    """Documents drawn like a published distribution, next to each other in sorted order."""
    rows: list[list[int]] = [[]]
    for length in sorted(draw_lengths(distribution, 256, 1.0, 7).tolist()):
        if rows[-1] and sum(rows[-1]) + length > budget:
            rows.append([])
        rows[-1].append(length)
    return rows


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    p=st.sampled_from([1, 2, 3, 4, 8, 16]),
    causal=st.booleans(),
    halves=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 4000)),
)
@settings(max_examples=150, deadline=None)
def test_every_token_has_a_rank_and_padding_stays_small(lengths, p, causal, halves, window):
    alignment = 2 * p if halves else p
    given = {"causal": causal, "alignment": alignment, "window": window}
    row = place(lengths, p, **given)  # Row checks that none is missing
    assert row.lengths == tuple(lengths) and row.p == p
    assert row.seq_length % alignment == 0
    tokens = sum(lengths)
    assert row.seq_length < tokens + max(alignment, tokens * MOST_PADDING + 1)
    assert row == place(lengths, p, **given)


@given(
    length=st.integers(1, 5000),
    p=st.sampled_from([2, 4, 8]),
    mask=st.one_of(st.booleans().map(lambda causal: (causal, None)), st.integers(1, 5000)),
)
@settings(max_examples=100, deadline=None)
def test_one_document_alone_is_spread_over_all_ranks(length, p, mask):
    """However much of it the queries are that see fewer keys than a window has."""
    causal, window = (True, mask) if isinstance(mask, int) else mask
    masked = {"causal": causal, "window": window}
    scores = scores_per_rank(place([length], p, **masked), **masked)
    pieces = 4 if window is None else 6  # they differ by a token
    assert max(scores) - min(scores) <= pieces * min(length, window or length)


@pytest.mark.parametrize("distribution", ["githubcode", "grch38"])
@pytest.mark.parametrize("p", [2, 4, 8, 16, 32, 64])
def test_scores_of_published_lengths_are_even(distribution, p):
    rows = [place(row, p, causal=True) for row in rows_of(distribution, BUDGET)]
    assert max(imbalance(row, causal=True) for row in rows) <= EVEN
    contiguous_ring = sum((p - 1) * row.seq_length for row in rows)
    assert sum(sum(keys_received(row)) for row in rows) < contiguous_ring


@pytest.mark.parametrize("distribution", ["githubcode", "grch38"])
@pytest.mark.parametrize("p", [2, 8, 64])
@pytest.mark.parametrize("window", [128, 4096, 16384])
def test_scores_that_a_window_leaves_are_even(distribution, p, window):
    """Not less so than where all scores are counted."""
    lengths = rows_of(distribution, BUDGET)
    by_window, by_all = (
        max(
            imbalance(place(row, p, causal=True, window=placed_by), causal=True, window=window)
            for row in lengths
        )
        for placed_by in (window, None)
    )
    assert by_window <= min(EVEN, by_all)


def test_a_document_beyond_the_window_takes_as_much_as_short_ones_of_its_tokens():
    """By all pairs the long one would have to be spread."""
    lengths = [1000, *[10] * 100]
    row = place(lengths, 2, causal=True, window=2)
    assert keys_received(row) == [0, 0] != keys_received(place(lengths, 2, causal=True))
    assert imbalance(row, causal=True, window=2) <= EVEN


def test_short_documents_stay_whole():
    row = place([5 + n % 7 for n in range(400)], 4, causal=True, alignment=8)
    assert keys_received(row) == [0, 0, 0, 0]


@pytest.mark.parametrize(("short", "padded", "crossing"), [(62, 128, []), (58, 122, [0, 1])])
def test_whole_documents_pad_a_row_by_a_32nd_at_most(short, padded, crossing):
    row = place([64, short], 2, causal=True)
    assert row.seq_length == padded and sorted(ranks_of_crossing(row)) == crossing


def ranks_of_crossing(row: Row) -> dict[int, int]:
    """On how many ranks the documents lie that are on more than one."""
    held = Counter(number for pieces in row.pieces for number in {piece[0] for piece in pieces})
    return {number: ranks for number, ranks in held.items() if ranks > 1}


def test_documents_that_need_two_ranks_are_on_two():
    row = place([400, 400, *[10] * 20], 4, causal=True)
    assert ranks_of_crossing(row) == {0: 2, 1: 2}
    assert imbalance(row, causal=True) <= EVEN


@pytest.mark.parametrize(
    ("lengths", "p", "least", "most"),
    [
        ([293, 10, 224], 3, 1.08, EVEN),  # by the first share, 1.008 by the second
        ([106, 215, 103, 25, 19, 25, 10, 26], 3, 1.0, 1.01),  # 1.102 by the third share
        ([10, 11], 5, EVEN, 1.2),  # 1.32 by the first share, and no other is even
    ],
)
def test_the_largest_share_that_makes_a_row_even_is_taken_or_else_the_most_even(
    lengths, p, least, most
):
    row = place(lengths, p, causal=True)
    assert least < imbalance(row, causal=True) <= most


def test_short_documents_even_out_what_spread_ones_left():
    """To each the rank of the least scores: the ranks of the long ones have more from the start."""
    short = [65, 91, 29, 93, 59, 11, 2, 88, 88, 76, 61, 68, 5, 42, 44, 100, 100, 117, 42, 62, 82]
    row = place([517, 699, *short, 92, 74, 98, 115, 37, 98, 74, 112, 113, 68], 3, causal=True)
    assert imbalance(row, causal=True) <= 1.01


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    p=st.sampled_from([2, 3, 4, 8]),
)
@settings(max_examples=60, deadline=None)
def test_a_rank_holds_one_piece_of_a_document_in_bidirectional_attention(lengths, p):
    """All its queries see as much: halves from both ends would even out nothing."""
    for pieces in place(lengths, p, causal=False).pieces:
        numbers = [number for number, _, _ in pieces]
        assert len(set(numbers)) == len(numbers)


def test_like_documents_take_a_rank_each():
    assert keys_received(place([100] * 8, 8, causal=True)) == [0] * 8


def test_whole_documents_do_not_cross_ranks_where_a_row_is_padded_as_far_anyway():
    """31 tokens in rows of 32, which is more than a 32nd."""
    row = place([16, 15], 2, causal=True, alignment=4)
    assert row.seq_length == 32 and not ranks_of_crossing(row)
