"""Attention masks of Megatron: padding at the end is taken, what no strategy heeds is refused."""

from __future__ import annotations

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_paradyse import attention_masks
from megatron_paradyse.attention_masks import check_of_generation, documents_of_mask
from megatron_paradyse.errors import UserError


def causal(s: int, *lengths: int) -> torch.Tensor:
    """[b, 1, s, s] of sequences with so many tokens: later ones and padding are hidden."""
    keys = torch.arange(s)
    later = keys > keys[:, None]
    return torch.stack([(later | (keys >= n))[None] for n in lengths])


@pytest.fixture(params=[2, 1024], ids=["in tiles", "at once"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(attention_masks, "QUERIES", request.param)


@pytest.mark.usefixtures("tiles")
class TestCausal:
    def test_of_whole_sequences_says_nothing(self):
        assert documents_of_mask(None, batch_size=1, causal=True) is None
        assert documents_of_mask(causal(7, 7), batch_size=1, causal=True) is None
        assert documents_of_mask(causal(7, 7), batch_size=3, causal=True) is None

    def test_padding_at_the_end_is_known(self):
        expected = (((0, 5),), ((0, 7),))
        assert documents_of_mask(causal(7, 5, 7), batch_size=2, causal=True) == expected
        assert documents_of_mask(causal(7, 5), batch_size=2, causal=True) == (((0, 5),),) * 2

    def test_what_padding_sees_does_not_matter(self):
        mask = causal(7, 5)
        mask[:, :, 5:] = True
        assert documents_of_mask(mask, batch_size=1, causal=True) == (((0, 5),),)
        mask[:, :, 5:] = False
        mask[:, :, 5:, 5:] = True
        assert documents_of_mask(mask, batch_size=1, causal=True) == (((0, 5),),)

    @pytest.mark.parametrize("place", [(5, 3), (6, 0), (2, 4), (3, 6)])
    def test_another_key_hidden_or_seen_is_refused(self, place):
        mask = causal(7, 7)
        mask[0, 0, *place] ^= True
        with pytest.raises(UserError, match="hides other keys than later tokens"):
            documents_of_mask(mask, batch_size=1, causal=True)

    def test_bidirectional_is_refused(self):
        mask = torch.zeros(1, 1, 7, 7, dtype=torch.bool)
        with pytest.raises(UserError, match="later tokens and padding"):
            documents_of_mask(mask, batch_size=1, causal=True)

    def test_one_for_all_queries_is_refused(self):
        """Megatron's own attention would see later tokens, which strategies never show."""
        mask = torch.arange(7)[None, None, None] >= 5
        with pytest.raises(UserError, match=r"\[1, 1, 1, 7\] shows later tokens .*: give none"):
            documents_of_mask(mask, batch_size=1, causal=True)
        one = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
        assert documents_of_mask(one, batch_size=1, causal=True) is None

    def test_padding_at_the_beginning_is_refused(self):
        mask = causal(7, 7)
        mask[..., :2] = True
        with pytest.raises(UserError, match="padding inside a sequence"):
            documents_of_mask(mask, batch_size=1, causal=True)


def test_bidirectional_masks_of_padding_are_known():
    keys = torch.arange(6)
    valid = torch.stack([keys < 4, keys < 6])
    expected = (((0, 4),), ((0, 6),))
    for mask in (~valid[:, None, None], ~(valid[:, None, None] & valid[:, None, :, None])):
        assert documents_of_mask(mask, batch_size=2, causal=False) == expected
    with pytest.raises(UserError, match="hides other keys than padding,"):
        documents_of_mask(causal(6, 6), batch_size=1, causal=False)


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(1, 1, 4, 4),
        torch.zeros(4, 4, dtype=torch.bool),
        torch.zeros(1, 2, 4, 4, dtype=torch.bool),
    ],
)
def test_other_kinds_are_refused(mask):
    with pytest.raises(UserError, match=r"an attention mask of torch\."):
        documents_of_mask(mask, batch_size=1, causal=True)


def test_while_text_is_generated_queries_are_the_last_of_the_keys():
    for mask in (
        None,
        causal(7, 7),
        causal(7, 5),
        causal(7, 7)[..., 4:, :],
        causal(7, 7)[..., 6:, :],
    ):
        check_of_generation(mask, None)
    for first in (0, 4, 6):
        mask = causal(7, 7)[..., first:, :]
        mask[..., :2] = True  # as of a prompt with padding before it
        with pytest.raises(UserError, match=r"padding inside a|other keys than later tokens while"):
            check_of_generation(mask, None)


def test_packed_documents_are_refused_while_text_is_generated():
    check_of_generation(None, PackedSeqParams())  # of none
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 7]))
    with pytest.raises(UserError, match="packed_seq_params while text is generated"):
        check_of_generation(None, packed)
