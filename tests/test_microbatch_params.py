"""What comes with a microbatch, as a row of documents, and as Megatron's own parameters again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_paradyse.errors import UserError
from megatron_paradyse.microbatch_params import (
    RowParams,
    packed_for_kernels,
    planned_microbatch,
    row_of,
)
from megatron_paradyse.packing.row import Row, contiguous
from megatron_paradyse.plan import Plan

SPREAD = Row((5, 2), (((0, 2), (5, 7)), ((2, 5), (7, 8))))


def _packed(*ends: int, **more) -> PackedSeqParams:
    cumulative = torch.tensor(ends, dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cumulative, cu_seqlens_kv=cumulative.clone(), **more
    )


def _row(params, seq_length=8, batch_size=1, p=2):
    return row_of(params, seq_length=seq_length, batch_size=batch_size, p=p)


def test_a_row_is_the_one_that_came():
    assert _row(RowParams(row=SPREAD)) is SPREAD


@pytest.mark.parametrize("params", [None, PackedSeqParams()])
def test_without_packed_documents_there_is_no_row(params):
    assert _row(params, batch_size=3) is None


@pytest.mark.parametrize("ends", [(0, 3, 7), (0, 3, 7, 7), (0, 3, 3, 7)])
def test_megatrons_packed_sequences_are_contiguous_documents(ends):
    """Of no tokens are none; what is left of s is padding."""
    assert _row(_packed(*ends)) == contiguous((3, 4), 2)


def test_queries_stand_for_keys_that_are_not_told():
    params = _packed(0, 3, 8)
    params.cu_seqlens_kv = None
    assert _row(params) == contiguous((3, 5), 2)


def test_padding_between_documents_belongs_to_none():
    params = _packed(0, 3, 5, cu_seqlens_q_padded=torch.tensor([0, 4, 8], dtype=torch.int32))
    row = _row(params)
    assert row == Row((3, 2), (((0, 3), (5, 6)), ((3, 5), (6, 8))))


@pytest.mark.parametrize(
    ("params", "batch_size", "message"),
    [
        (_packed(0, 3, 9), 1, "ascending ranges of 8 tokens"),
        (_packed(0, 5, 3, 8), 1, "ascending ranges of 8 tokens"),
        (_packed(0, 0), 1, "have a token at least"),
        (_packed(0, 3, 8, local_cp_size=2), 1, "over 2 ranks of dynamic context parallelism"),
        (_packed(0, 3, 8), 2, "--micro-batch-size 1"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(params, batch_size, message):
    with pytest.raises(UserError, match=message) as raised:
        _row(params, batch_size=batch_size)
    assert "\n" not in str(raised.value)


def test_queries_of_other_documents_than_the_keys_are_refused():
    params = _packed(0, 3, 8)
    params.cu_seqlens_kv = torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.raises(UserError, match="same queries and keys"):
        _row(params)


def test_angles_restart_at_each_document_in_either_order():
    planned = planned_microbatch(None, SPREAD, None, plan=Plan({}), seed=0)
    table = torch.arange(5.0).view(5, 1, 1, 1) + 0.5
    assert planned.angles(table).flatten().tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 0.5, 1.5, 0.5]
    by_rows = planned.angles(table, by_rows=True)
    assert by_rows.flatten().tolist() == [0.5, 1.5, 0.5, 1.5, 2.5, 3.5, 4.5, 0.5]
    assert planned.angles(table, by_rows=True) is by_rows  # made once for all layers


def test_the_angles_of_one_document_are_the_table_itself():
    """A wide row's would else be there twice, for all positions of all replicas."""
    row = replace(contiguous((7,), 4, alignment=8), groups=2)
    params = RowParams(row=row)
    table = torch.arange(8.0).view(8, 1, 1, 1)
    planned = planned_microbatch(params, row, None, plan=Plan({}), seed=0)
    assert params.max_seqlen_q == 8 and planned.angles(table) is table
    assert RowParams(row=SPREAD).max_seqlen_q == 5


def test_megatrons_attention_does_not_see_packed_sequences():
    """It would else take the row apart itself; what came is kept for TransformerEngine's."""
    original = _packed(0, 3, 8)
    planned = planned_microbatch(original, _row(original), None, plan=Plan({}), seed=0)
    assert (planned.qkv_format, planned.original.qkv_format) == ("sbhd", "thd")
    assert planned.documents == (((0, 3), (3, 8)),)


def test_what_kernels_are_told_of_documents_is_made_once_for_all_layers():
    params = RowParams(row=contiguous((3, 5), 2))
    planned = planned_microbatch(params, params.row, None, plan=Plan({}), seed=0)
    told = planned.for_kernels(torch.device("cpu"))
    assert told.cu_seqlens_q.tolist() == [0, 3, 8] and told.cu_seqlens_q.dtype == torch.int32
    assert planned.for_kernels(torch.device("cpu")) is told
    original = _packed(0, 3, 8)
    planned = planned_microbatch(original, _row(original), None, plan=Plan({}), seed=0)
    assert planned.for_kernels(torch.device("cpu")) is original


def test_padding_goes_to_kernels_as_documents_no_longer_than_the_longest():
    """RoPE's table is as long as that."""
    params = packed_for_kernels(contiguous((3, 2), 2, alignment=12), torch.device("cpu"))
    assert params.cu_seqlens_q.tolist() == [0, 3, 5, 8, 11, 12]
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("thd", 3, 3)


def test_what_is_rolled_and_summed_stays_within_documents():
    """Rows of all ranks, one after the other: of p=2 with padding on the second."""
    params = RowParams(row=SPREAD)
    values = torch.tensor([[10, 11, 15, 16, 12, 13, 14, 17]])  # by positions 10 to 17
    for _ in range(2):  # what is kept for other layers as well
        assert params.rolled(values).tolist() == [[11, 12, 16, 0, 13, 14, 0, 0]]
        assert params.rolled(values[None])[0].tolist() == params.rolled(values).tolist()
        assert params.sums(values)[0, [0, 1, 4, 5, 6]].tolist() == [60] * 5
        assert params.sums(values)[0, [2, 3]].tolist() == [31] * 2


def test_the_first_row_may_be_the_next_of_another():
    params = RowParams(row=Row((8,), (((2, 6),), ((0, 2), (6, 8)))))
    values = torch.tensor([[2, 3, 4, 5, 0, 1, 6, 7]])
    assert params.rolled(values).tolist() == [[3, 4, 5, 6, 1, 2, 7, 0]]


def test_every_layer_of_every_microbatch_drops_other_scores():
    seeds = [
        planned_microbatch(None, None, None, plan=Plan({}), seed=seed).dropout_seed(layer)
        for seed in (0, 1, 2, 2**32 - 1)
        for layer in (1, 2, 4095)
    ]
    assert len({*seeds}) == len(seeds) and max(seeds) < 2**63


def test_angles_are_of_the_table_that_is_given():
    """Megatron's is another one after a longer microbatch, and shorter than padding may be."""
    row = contiguous((5,), 2, alignment=8)
    planned = planned_microbatch(None, row, None, plan=Plan({}), seed=0)
    table = torch.arange(5.0).view(5, 1, 1, 1)
    for one in (table, table + 10):
        angles = planned.angles(one)
        assert len(angles) == 8 and torch.equal(angles[:5], one)


def test_rows_of_one_document_have_angles_in_their_own_order():
    row = Row((8,), (((0, 2), (6, 8)), ((2, 6),)))
    planned = planned_microbatch(None, row, None, plan=Plan({}), seed=0)
    angles = planned.angles(torch.arange(8.0).view(8, 1, 1, 1), by_rows=True)
    assert angles.flatten().tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def test_a_plan_travels_with_the_groups_and_the_seed_of_its_microbatch():
    params = RowParams(row=SPREAD, wide="the groups")
    planned = planned_microbatch(params, SPREAD, None, plan=Plan({}), seed=7)
    assert (planned.wide, planned.seed) == ("the groups", 7)
    assert planned.shards == SPREAD.shards
    assert planned_microbatch(None, None, None, plan=Plan({}), seed=7).shards is None
