"""Memory of packed rows where no walk tells: bounds, against what is counted on each rank."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron_paradyse.costs import row_bounds
from megatron_paradyse.costs.row_bytes import joined
from megatron_paradyse.costs.row_sizes import packed_of
from megatron_paradyse.costs.table import ATTENTION, OperationCosts
from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.packing.load import load_of, load_of_one
from megatron_paradyse.packing.placement import place
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.simulator.flash_kernel import flash_kernel
from megatron_paradyse.strategies import base_name, takes, tiled_kernel
from megatron_paradyse.strategies.accounting import SPLIT_HEADS
from megatron_paradyse.strategies.sizes import LayerSizes
from tests.costs.counted_rows import (
    BYTES,
    NAMES,
    TOLERANCE,
    VARIANTS,
    D,
    N,
    S,
    case_of,
    measured,
    measured_wide,
    model_of,
    off,
    rows,
)
from tests.costs.synthetic import DESCRIPTION
from tests.packing.rows import zigzag
from tests.strategies.cases import AttentionCase


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(("window", "variant"), [(12, "activations"), (40, "shared keys")])
def test_within_a_narrow_window_rows_hold_what_is_predicted(strategy, window, variant):
    """Counted from what one document of as many tokens holds, of which less is exchanged."""
    p, suffix = 4, strategy.removeprefix(base_name(strategy))
    one = load_of_one(S, p, causal=True, window=window).within
    assert one.keys_received == window - 1

    def alone(name):
        case = dataclasses.replace(case_of(name, p, "causal", variant, None), window=window)
        return OperationCosts(0.0, 0.0, *(measured(case)[quantity] for quantity in BYTES))

    least = alone("megatron_cz" + suffix)
    like = least if base_name(strategy) == "local_z" else alone(strategy)
    sizes = dataclasses.replace(
        LayerSizes(
            s=p, b=1, n=N, d=D, f=1, p=p, h=VARIANTS[variant]["h"], g=VARIANTS[variant]["g"]
        ),
        element_bytes=VARIANTS[variant]["dtype"].itemsize,
    )
    for label, row in rows(p).items():
        if not takes(strategy, microbatch_of(row), p):
            continue
        truth = measured(
            dataclasses.replace(case_of(strategy, p, "causal", variant, row), window=window)
        )
        load = load_of(row, causal=True, window=window).within
        costs = row_bounds.with_row_bytes(
            strategy, like, sizes, load, one, least=least, tiled_window=window
        )
        assert costs.kept_bytes == pytest.approx(truth["kept_bytes"], rel=TOLERANCE), label
        for name in BYTES[1:]:
            found = costs.kept_bytes + getattr(costs, name)
            peak = truth["kept_bytes"] + truth[name]
            assert found > (1 - TOLERANCE) * peak, (label, name, found, peak)


@pytest.mark.parametrize(("strategy", "documents"), [("megatron_cz", 2), ("metp", 16)])
def test_forwards_of_rows_hold_what_chunks_within_a_narrow_window_do_not(strategy, documents):
    """Results of many queries to be merged, where pieces are long; and angles of their rows."""
    p, s, window = 8, 512, 32
    row = place([s // documents] * documents, p, causal=True, alignment=s, window=window)
    case = case_of(strategy, p, "causal", "weights", None)
    case = dataclasses.replace(case, s=s, window=window, g=4, rope="half")
    sizes = dataclasses.replace(
        model_of(4, "causal", "weights").packed.sizes, p=p, s=p, g=4, rope_channels=D
    )
    with flash_kernel():
        one, truth, loads = within_window(case, row)
    found = row_bounds.with_row_bytes(
        strategy, one, sizes, *loads, least=None, tiled_window=None, in_one_call=True
    )
    peak = truth.kept_bytes + truth.forward_bytes
    excess = (found.kept_bytes + found.forward_bytes) / peak - 1
    assert -TOLERANCE < excess < 0.25


def within_window(case, row):
    """Costs as counted, of one document and of the row, and the loads of the row and of one."""
    one, truth = (
        OperationCosts(0.0, 0.0, *(measured.__wrapped__(of)[q] for q in BYTES))
        for of in (case, dataclasses.replace(case, row=row))
    )
    seen = {"causal": True, "window": case.window}
    return one, truth, (load_of(row, **seen).within, load_of_one(case.s, case.p, **seen).within)


@pytest.mark.parametrize("strategy", ["megatron_cz", "metp"])
def test_room_for_several_documents_is_counted_beside_a_chunk_within_a_narrow_window(strategy):
    """Of a chunk alone the kernel's result is all; and tiles of scores are there beside either."""
    p, s, window = 2, 512, 16
    row = contiguous((256, 128, 128), p)
    sizes = {"n": 2, "g": 1, "d": 32, "h": 128}
    case = AttentionCase(strategy, p, "causal", **sizes, s=s, b=1, window=window)
    one, truth, loads = within_window(case, row)
    found = row_bounds.with_row_bytes(
        strategy, one, LayerSizes(s=s, b=1, **sizes, f=1, p=p, element_bytes=4), *loads,
        least=None, tiled_window=window, windowed=True,
    )  # fmt: skip
    assert found.forward_bytes >= truth.forward_bytes
    assert found.backward_bytes >= truth.backward_bytes


@pytest.mark.parametrize("strategy", ["megatron_cz", "metp"])
def test_pieces_of_one_document_that_do_not_see_each_other_are_one_call(strategy):
    """Of a wide row within a window, where flash kernels run."""
    p, s, window = 2, 64, 21
    row = dataclasses.replace(zigzag((2 * s - 1,), 2 * p), groups=2)
    case = case_of(strategy, p, "causal", "weights", None)
    case = dataclasses.replace(case, s=s, window=window, n=4, g=1)
    sizes = dataclasses.replace(model_of(4, "causal", "weights").packed.sizes, p=p, s=p, n=4, g=1)
    with flash_kernel():
        one = OperationCosts(0.0, 0.0, *(measured.__wrapped__(case)[q] for q in BYTES))
        truth = measured_wide.__wrapped__(dataclasses.replace(case, s=2 * s, row=row), 2)
    loads = (
        load_of(row, causal=True, window=window).within,
        load_of_one(s, p, causal=True, window=window).within,
    )
    found = row_bounds.with_row_bytes(
        strategy, one, sizes, *loads, least=None, tiled_window=None, in_one_call=True, windowed=True
    )
    assert not list(off(found, truth))


@pytest.mark.parametrize(("p", "groups"), [(1, 2), (1, 4), (2, 2), (4, 4)])
@pytest.mark.parametrize("strategy", [name for name in NAMES if base_name(name) in SPLIT_HEADS])
def test_of_one_document_over_groups_no_rank_of_split_heads_holds_more(strategy, p, groups):
    """Its keys come in parts, whose results are summed; and one rank's rows are in order."""
    wrong, row = [], dataclasses.replace(zigzag((groups * S,), groups * p), groups=groups)
    loads = load_of(row, causal=True), load_of_one(S, p, causal=True)
    for variant in ("weights", "shared keys"):
        case = case_of(strategy, p, "causal", variant, None)
        one = OperationCosts(0.0, 0.0, *(measured(case)[q] for q in BYTES))
        sizes = dataclasses.replace(model_of(4, "causal", variant).packed.sizes, p=p, s=p)
        found = row_bounds.with_row_bytes(
            strategy, one, sizes, *loads, least=None, tiled_window=None
        )
        truth = measured_wide(dataclasses.replace(case, s=groups * S, row=row), groups)
        wrong += off(found, truth, variant)
    assert not wrong


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("strategy", ["megatron_cz", "metp+recompute"])
def test_a_ring_of_one_rank_holds_no_more_than_predicted(strategy, groups):
    """One call computes its single document, and a row's results need room or are summed."""
    case = case_of(strategy, 1, "causal", "shared keys", None)
    one = OperationCosts(0.0, 0.0, *(measured(case)[q] for q in BYTES))
    sizes = dataclasses.replace(model_of(4, "causal", "shared keys").packed.sizes, p=1, s=1)
    row = dataclasses.replace(zigzag((groups * S // 2,) * 2, groups), groups=groups)
    case = dataclasses.replace(case, s=groups * S, row=row)
    truth = measured(case) if groups == 1 else measured_wide(case, groups)
    found = row_bounds.with_row_bytes(
        strategy, one, sizes, load_of(row, causal=True), load_of_one(S, 1, causal=True),
        least=None, tiled_window=None,
    )  # fmt: skip
    assert not list(off(found, truth))


@pytest.mark.parametrize(("s", "window", "count"), [(256, 8, 1), (1024, 32, 2)])
def test_of_local_z_tiles_and_room_are_of_all_heads_though_it_be_told_from_split_ones(
    s, window, count
):
    p, variant = 4, "activations"
    row, like = contiguous([s // (p * count)] * (p * count), p), "ulysses_z"
    case = dataclasses.replace(case_of(like, p, "causal", variant, None), s=s, window=window)
    one = OperationCosts(0.0, 0.0, *(measured.__wrapped__(case)[q] for q in BYTES))
    truth = measured.__wrapped__(dataclasses.replace(case, strategy="local_z", row=row))
    loads = (
        load_of(row, causal=True, window=window).within,
        load_of_one(s, p, causal=True, window=window).within,
    )
    sizes = model_of(p, "causal", variant).packed.sizes
    found = row_bounds.with_row_bytes(
        "local_z", one, sizes, *loads, least=None, tiled_window=window, windowed=True, like=like
    )
    for name in BYTES[1:]:
        peak = truth["kept_bytes"] + truth[name]
        assert found.kept_bytes + getattr(found, name) > (1 - TOLERANCE) * peak


def test_where_flash_kernels_run_one_document_beside_padding_needs_room():
    strategy, p, variant = "megatron_ts+recompute", 4, "weights"
    row, case = contiguous([63], p), case_of(strategy, p, "causal", variant, None)
    case = dataclasses.replace(case, s=row.seq_length, d=8, g=4)
    sizes = dataclasses.replace(model_of(p, "causal", variant).packed.sizes, d=8, g=4)
    with flash_kernel():
        one = OperationCosts(0.0, 0.0, *(measured.__wrapped__(case)[q] for q in BYTES))
        truth = measured.__wrapped__(dataclasses.replace(case, row=row))
    loads = load_of(row, causal=True), load_of_one(row.seq_length, p, causal=True)
    load = joined(strategy, loads[0])
    found = row_bounds.with_row_bytes(
        strategy, one, sizes, load, loads[1], least=None, tiled_window=None, in_one_call=True
    )
    assert not list(off(found, truth))


@pytest.mark.parametrize("strategy", ["megatron_ts", "ulysses_z+recompute"])
def test_where_flash_kernels_run_documents_within_a_window_need_room_beside_padding(strategy):
    """They are one call, in a layer with the window too."""
    p, window, variant = 2, 40, "weights"
    row, case = contiguous([29] * 8 + [1], p), case_of(strategy, p, "causal", variant, None)
    case = dataclasses.replace(case, s=row.seq_length, h=16, window=window)
    assert row.padding
    with flash_kernel():
        one = OperationCosts(0.0, 0.0, *(measured.__wrapped__(case)[q] for q in BYTES))
        truth = measured.__wrapped__(dataclasses.replace(case, row=row))
    load = joined(strategy, load_of(row, causal=True, window=window), windowed=True).within
    of_one = load_of_one(row.seq_length, p, causal=True, window=window).within
    sizes = dataclasses.replace(model_of(p, "causal", variant).packed.sizes, h=16)
    found = row_bounds.with_row_bytes(
        strategy, one, sizes, load, of_one,
        least=None, tiled_window=None, in_one_call=True, windowed=True,
    )  # fmt: skip
    assert not list(off(found, truth))


@pytest.mark.parametrize(
    ("dropout", "counts"),
    [(0.0, row_bounds.TILES), (0.1, row_bounds.TILES_WITH_DROPOUT)],
)
def test_a_tile_of_the_tiled_kernel_holds_what_is_counted(dropout, counts):
    """Tensors of scores and of what is made of them, masks among them, and little else."""
    assert row_bounds.TILE == tiled_kernel.TILE
    n, d, rows, window = 16, 2, 192, 65  # three tiles, the last two as large as any
    q, k, v = (torch.randn(1, n, rows, d) for _ in range(3))
    rule = tiled_kernel.BlockRule(scale=1.0, causal=True, window=window, dropout=dropout)
    scores = n * tiled_kernel.TILE * (window + tiled_kernel.TILE - 1) * 4
    with LiveBytes((q, k, v)) as meter:
        out, lse = tiled_kernel.tiled_forward(q, k, v, rule)
        forward = meter.peak_bytes - meter.live_bytes
        meter.reset_peak()
        before = meter.live_bytes
        tiled_kernel.tiled_backward(torch.ones_like(q), q, k, v, out, lse, rule)
        backward = meter.peak_bytes - before
    others = 5 * q.nbytes  # gradients, copies of the queries of a tile, one mask for all heads
    for held, count in zip((forward, backward), counts, strict=True):
        assert (count - 1) * scores < held <= count * scores + others


@pytest.mark.parametrize(
    ("kind", "dtype", "head_dim", "drops", "windows"),
    [
        ("cpu", "bfloat16", 64, False, (7, None)),
        ("cuda", "bfloat16", 64, False, (None, None)),
        ("cuda", "float32", 64, False, (7, None)),
        ("cuda", "bfloat16", 60, False, (7, None)),
        ("cuda", "bfloat16", 264, False, (7, None)),
        ("cuda", "bfloat16", 64, True, (7, math.inf)),
    ],
)
def test_tiles_are_counted_where_the_tiled_kernel_runs(kind, dtype, head_dim, drops, windows):
    """For a window that no other kernel knows, and for dropout: layers with the window, others."""
    description = dataclasses.replace(
        DESCRIPTION,
        model=dataclasses.replace(DESCRIPTION.model, head_dim=head_dim),
        hardware=dataclasses.replace(DESCRIPTION.hardware, kind=kind),
        dtype=dtype,
        attention_mask="causal",
        attention_dropout=drops,
        halves={"attention": {"window": 7}},
    )
    packed = packed_of(description)
    assert tuple(map(packed.tiled_window, (ATTENTION, "attention@2"))) == windows
    sizes = dataclasses.replace(packed.sizes, p=4)
    loads = load_of(contiguous([32] * 4, 4), causal=True), load_of_one(128, 4, causal=True)
    for window in windows:
        more = row_bounds.extra_bytes("local_z", sizes, *loads, window)
        assert (more > row_bounds.extra_bytes("local_z", sizes, *loads)) == (window is not None)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("strategy", ["colossal_z", "colossal_z+recompute"])
def test_fewer_columns_of_scores_leave_products_as_large(strategy, p):
    """In half types, where no walk tells: of windows and dropout."""
    row, variant = contiguous([S // 2, S // 2], p), "shared keys"

    def alone(name):
        found = measured(case_of(name, p, "causal", variant, None))
        return OperationCosts(0.0, 0.0, *(found[quantity] for quantity in BYTES))

    least = alone(strategy.replace("colossal_z", "megatron_cz"))
    loads = load_of(row, causal=True), load_of_one(S, p, causal=True)
    sizes = model_of(p, "causal", variant).packed.sizes
    costs = row_bounds.with_row_bytes(
        strategy, alone(strategy), sizes, *loads, least=least, tiled_window=None
    )
    assert loads[0].keys_received < loads[1].keys_received
    assert not list(off(costs, measured(case_of(strategy, p, "causal", variant, row))))


@pytest.mark.parametrize("strategy", ["colossal_z", "colossal_z+recompute"])
def test_fewer_columns_leave_the_hashes_of_dropout_as_large(strategy):
    """In half types: beside them are the probabilities of fewer columns, and no scores any more."""
    p, s, variant = 4, 384, "shared keys"  # long enough for hashes to outweigh projections
    row = contiguous([s // (2 * p)] * (2 * p), p)

    def counted(name, row=None):
        case = case_of(name, p, "causal", variant, row)
        return measured(dataclasses.replace(case, s=s, dropout=0.1))

    one, least = (
        OperationCosts(0.0, 0.0, *(counted(name)[quantity] for quantity in BYTES))
        for name in (strategy, strategy.replace("colossal_z", "megatron_cz"))
    )
    loads = load_of(row, causal=True), load_of_one(s, p, causal=True)
    sizes = model_of(p, "causal", variant).packed.sizes
    costs = row_bounds.with_row_bytes(
        strategy, one, sizes, *loads, least=least, tiled_window=None, drops=True
    )
    assert not list(off(costs, counted(strategy, row)))
