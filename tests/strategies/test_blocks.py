"""Block planning covers exactly the visible pairs, once, whatever the chunks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies.blocks import (
    balanced_spans,
    blocks_of,
    contiguous_spans,
    spans_of_ranges,
    whole,
)
from megatron_paradyse.strategies.contract import AttentionShape, Microbatch
from megatron_paradyse.strategies.reference import visible_pairs
from tests.strategies.cases import MASKS, documents_of


def _shape(causal: bool, window: int | None = None) -> AttentionShape:
    return AttentionShape(
        num_heads=1, num_kv_heads=1, head_dim=1, causal=causal, softmax_scale=1.0, window=window
    )


def _count_covered(spans_of, p: int, shape: AttentionShape, microbatch: Microbatch):
    """[b, s, s]: how many blocks cover each pair, over all pairs of ranks."""
    s, b = microbatch.seq_length, microbatch.batch_size
    count = torch.zeros(b, s, s, dtype=torch.long)
    total = 0
    for q_rank in range(p):
        for k_rank in range(p):
            q_spans, k_spans = spans_of(microbatch, p, q_rank), spans_of(microbatch, p, k_rank)
            for block in blocks_of(q_spans, k_spans, shape, microbatch):
                q = _positions(q_spans)[slice(*block.q_rows)][:, None]
                k = _positions(k_spans)[slice(*block.k_rows)]
                assert (q[0, 0], k[0]) == (block.q_start, block.k_start)
                seen = torch.ones(len(q), len(k), dtype=torch.bool)
                if block.causal:
                    seen &= k <= q
                if block.window is not None:
                    seen &= q - k < block.window
                first, stop = block.sequences
                count[first:stop, q, k] += seen
                total += block.num_scores
    return count, total


def _positions(spans) -> torch.Tensor:
    """The global position of every row that the spans hold."""
    return torch.cat([torch.arange(span.start, span.stop) for span in spans])


@pytest.mark.parametrize(
    ("mask", "window"),
    [(m, w) for m in MASKS for w in (None, 1, 4, 100) if w is None or m.endswith("causal")],
)
@pytest.mark.parametrize("spans_of", [contiguous_spans, balanced_spans])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_blocks_cover_each_visible_pair_once(p, spans_of, mask, window):
    causal = mask.endswith("causal")
    microbatch = Microbatch(36, 3, documents_of(mask, 36, 3))
    shape = _shape(causal, window)
    count, total = _count_covered(spans_of, p, shape, microbatch)
    visible = visible_pairs(shape, microbatch)
    assert torch.equal(count, visible.long())
    assert total == visible.sum()


def test_one_call_serves_the_whole_batch_without_documents():
    microbatch = Microbatch(8, 5)
    assert len(blocks_of(whole(microbatch), whole(microbatch), _shape(True), microbatch)) == 1


def test_sequences_with_the_same_documents_share_their_blocks():
    microbatch = Microbatch(8, 4, (((0, 5),),) * 4)
    (block,) = blocks_of(whole(microbatch), whole(microbatch), _shape(True), microbatch)
    assert block.sequences == (0, 4) and block.q_rows == (0, 5)


def _scores_by_rank(spans_of, p: int, s: int) -> list[int]:
    microbatch, shape = Microbatch(s, 1), _shape(True)
    return [
        sum(
            block.num_scores
            for source in range(p)
            for block in blocks_of(
                spans_of(microbatch, p, rank), spans_of(microbatch, p, source), shape, microbatch
            )
        )
        for rank in range(p)
    ]


@pytest.mark.parametrize("p", [2, 3, 4, 8, 16, 32, 64])
def test_balanced_causal_ring_gives_every_rank_the_same_work(p):
    """The largest share is at most 1.1 of the smallest; contiguous chunks give about 2p - 1."""
    work = _scores_by_rank(balanced_spans, p, 64 * p)
    assert max(work) <= 1.001 * min(work)
    uneven = _scores_by_rank(balanced_spans, p, 63 * p)
    assert max(uneven) <= 1.1 * min(uneven)
    contiguous = _scores_by_rank(contiguous_spans, p, 64 * p)
    assert max(contiguous) > 1.8 * (p - 0.5) * min(contiguous)


@pytest.mark.parametrize("p", [4, 8, 64])
def test_every_step_of_the_balanced_ring_is_balanced(p):
    microbatch, shape = Microbatch(16 * p, 1), _shape(True)
    for step in range(p):
        work = {
            sum(
                block.num_scores
                for block in blocks_of(
                    balanced_spans(microbatch, p, rank),
                    balanced_spans(microbatch, p, (rank - step) % p),
                    shape,
                    microbatch,
                )
            )
            for rank in range(p)
        }
        assert len(work) == 1, (step, work)


@pytest.mark.parametrize("p", [2, 4, 5, 8])
def test_every_step_of_the_balanced_ring_is_one_kernel_call(p):
    microbatch, shape = Microbatch(16 * p, 1), _shape(True)
    for rank, source in itertools.product(range(p), repeat=2):
        blocks = blocks_of(
            balanced_spans(microbatch, p, rank),
            balanced_spans(microbatch, p, source),
            shape,
            microbatch,
        )
        assert [block.causal for block in blocks] == [rank == source], (rank, source)


def test_squares_are_joined_only_with_all_that_is_between_them():
    """Documents [0, 6) and [6, 16): rows of both, of three spans, and of other keys."""
    documents, shape = Microbatch(16, 1, documents=(((0, 6), (6, 16)),)), _shape(True)
    spans = spans_of_ranges([(2, 5), (6, 8), (10, 12), (14, 16)])
    blocks = blocks_of(spans, spans, shape, documents)
    assert [(block.q_rows, block.k_rows, block.causal) for block in blocks] == [
        ((0, 3), (0, 3), True),
        ((3, 9), (3, 9), True),
    ]
    assert blocks[1].num_scores == 6 * 7 // 2
    shuffled = spans_of_ranges([(10, 12), (6, 8)])
    blocks = blocks_of(shuffled, shuffled, shape, documents)
    assert sum(block.causal for block in blocks) == 2 and len(blocks) == 3


def test_blocks_with_dropout_are_not_merged():
    """Its mask is a function of positions, which must be contiguous in a block."""
    microbatch = Microbatch(16, 1)
    shape = replace(_shape(True), dropout=0.1)
    for source in (0, 3):
        spans = balanced_spans(microbatch, 4, 3), balanced_spans(microbatch, 4, source)
        assert len(blocks_of(*spans, shape, microbatch)) == (2 if source == 0 else 3)


def test_window_without_causal_is_refused():
    with pytest.raises(UserError, match="window needs causal"):
        _shape(False, window=4)
