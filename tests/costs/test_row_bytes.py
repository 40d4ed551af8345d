"""Memory of packed rows as it is counted on each rank, against what the cost model says.

Costs of single documents are those of the formulas, fitted as measured ones are; the strategies run
on the fake process group, which holds nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_paradyse.costs import row_bytes
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.row_costs import RowCosts
from megatron_paradyse.costs.table import (
    ATTENTION,
    Constants,
    CostTable,
    Measurement,
    OperationCosts,
)
from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.packing.load import load_of, load_of_one
from megatron_paradyse.packing.placement import place
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.simulator.flash_kernel import flash_kernel
from megatron_paradyse.strategies import (
    base_name,
    recomputes,
    strategy_names,
    takes,
    takes_wide,
    tiled_kernel,
)
from megatron_paradyse.strategies.accounting import attention_bytes, operation_costs
from megatron_paradyse.strategies.contract import Wide
from megatron_paradyse.strategies.sizes import LayerSizes
from tests.costs.synthetic import DESCRIPTION
from tests.packing.rows import zigzag
from tests.strategies.cases import AttentionCase
from tests.strategies.test_accounting import measure_rank, on_fake_ranks

S, N, D = 128, 8, 16
LENGTHS = (64, 96, 128, 192, 512)
BYTES = ("kept_bytes", "forward_bytes", "backward_bytes")
# Fits of the formulas, and the formulas themselves, are this far off at most.
TOLERANCE = 0.02
VARIANTS = {
    "activations": {"g": 8, "h": 16, "dtype": torch.float32},
    "weights": {"g": 8, "h": 128, "dtype": torch.bfloat16},
    "shared keys": {"g": 2, "h": 16, "dtype": torch.bfloat16},
    "gated": {"g": 2, "h": 16, "dtype": torch.float32, "gate": True},
}
NAMES = [name + suffix for name in strategy_names(packed=True) for suffix in ("", "+recompute")]


def rows(p):
    short = [5, 11, 2, 30, 1, 9, 6, 24, 3, 20, 7, 10]
    return {
        "in shards": contiguous([S // p // 2] * (2 * p), p),
        "short, spread": zigzag(short, p),
        "one, spread": zigzag((S,), p),
        "half and short ones": contiguous([S // 2] + [4] * (S // 8), p),
    }


def case_of(strategy, p, mask, variant, row):
    sizes = VARIANTS[variant]
    return AttentionCase(strategy, p, mask, n=N, d=D, s=S, b=1, row=row, **sizes)


@functools.cache
def model_of(p, mask, variant):
    """Fitted to the formulas of every strategy that has some."""
    v = VARIANTS[variant]
    shape = dataclasses.replace(
        DESCRIPTION.model,
        hidden_size=v["h"],
        num_heads=N,
        num_kv_heads=v["g"],
        head_dim=D,
        position_embedding="none",
    )
    dtype = str(v["dtype"]).removeprefix("torch.")
    halves = {"attention": {"output_gate": 1} if v.get("gate") else {}, "mlp": {}}
    description = dataclasses.replace(
        DESCRIPTION, model=shape, p=p, dtype=dtype, attention_mask=mask, halves=halves
    )
    points = []
    for name in NAMES:
        for s in LENGTHS if not name.startswith("local_z") else ():
            z = LayerSizes(
                s=s, b=1, h=v["h"], n=N, g=v["g"], d=D, f=1, p=p, causal=mask == "causal",
                element_bytes=v["dtype"].itemsize, gate=v.get("gate", False),
            )  # fmt: skip
            costs = operation_costs(name, ATTENTION, z)
            # as a profile counts: the input is the operation before's, the output is kept
            numbers = [1e-3 + 1e-6 * s, 1e-3 + 1e-6 * s, *(getattr(costs, q) for q in BYTES)]
            points.append(Measurement(name, ATTENTION, s, 1, "ok", *map(float, numbers)))
    return fit_table(CostTable(description, tuple(points), Constants(0.0, 0.0)))


@functools.cache
def measured(case):
    """Of each quantity the largest that any rank has."""
    found = on_fake_ranks(case, measure_rank, range(case.p))
    return {name: max(getattr(m, name) for m in found) for name in BYTES}


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
        costs = row_bytes.with_row_bytes(
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
        one, truth = (
            OperationCosts(0.0, 0.0, *(measured.__wrapped__(of)[q] for q in BYTES))
            for of in (case, dataclasses.replace(case, row=row))
        )
    loads = (
        load_of(row, causal=True, window=window).within,
        load_of_one(s, p, causal=True, window=window).within,
    )
    found = row_bytes.with_row_bytes(
        strategy, one, sizes, *loads, least=None, tiled_window=None, in_one_call=True
    )
    peak = truth.kept_bytes + truth.forward_bytes
    excess = (found.kept_bytes + found.forward_bytes) / peak - 1
    assert -TOLERANCE < excess < 0.25


def test_a_tile_of_the_tiled_kernel_holds_what_is_counted():
    """In its forward three tensors of scores, in its backward five, and little else."""
    assert row_bytes.TILE == tiled_kernel.TILE
    n, d, rows, window = 16, 8, 192, 65
    q, k, v = (torch.randn(1, n, rows, d) for _ in range(3))
    rule = tiled_kernel.BlockRule(scale=1.0, causal=True, window=window)
    scores = n * tiled_kernel.TILE * (window + tiled_kernel.TILE - 1) * 4
    with LiveBytes((q, k, v)) as meter:
        out, lse = tiled_kernel.tiled_forward(q, k, v, rule)
        forward = meter.peak_bytes - meter.live_bytes
        meter.reset_peak()
        before = meter.live_bytes
        tiled_kernel.tiled_backward(torch.ones_like(q), q, k, v, out, lse, rule)
        backward = meter.peak_bytes - before
    others = 10 * q.nbytes  # gradients, copies of the queries of a tile, one mask for all heads
    assert forward <= row_bytes.FORWARD_TILES * scores + others
    assert backward <= row_bytes.BACKWARD_TILES * scores + others
    assert forward > (row_bytes.FORWARD_TILES - 1) * scores
    assert backward > (row_bytes.BACKWARD_TILES - 1) * scores


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
    packed = row_bytes.packed_of(description)
    assert tuple(map(packed.tiled_window, (ATTENTION, "attention@2"))) == windows
    sizes = dataclasses.replace(packed.sizes, p=4)
    loads = load_of(contiguous([32] * 4, 4), causal=True), load_of_one(128, 4, causal=True)
    for window in windows:
        more = row_bytes.extra_bytes("local_z", sizes, *loads, window)
        assert (more > row_bytes.extra_bytes("local_z", sizes, *loads)) == (window is not None)


@pytest.mark.parametrize("strategy", NAMES)
def test_no_rank_holds_more_than_predicted_and_keeps_what_is(strategy):
    """Every row with a variant of the layer; +recompute with one row."""
    p, mask, wrong = 4, "causal", []
    variants = itertools.cycle(VARIANTS)
    for _ in range(NAMES.index(strategy)):
        next(variants)
    for (label, row), variant in zip(rows(p).items(), variants, strict=False):
        if not takes(strategy, microbatch_of(row), p):
            continue
        load = load_of(row, causal=True)
        costs = RowCosts(model_of(p, mask, variant), load)(strategy, ATTENTION, S)
        wrong += _off(costs, measured(case_of(strategy, p, mask, variant, row)), label, variant)
        if recomputes(strategy):
            break
    assert not wrong, "\n" + "\n".join(map(str, wrong))


WALKED = [name for name in NAMES if base_name(name) != "megatron_ts"]


@pytest.mark.parametrize("strategy", WALKED)
def test_peaks_of_rows_are_near_what_ranks_hold(strategy):
    """Of layers that the walks know: never 2% below, 8% above at the median, 25% at most."""
    p, excess = 4, []
    variants = itertools.cycle(VARIANTS)
    for _ in range(WALKED.index(strategy)):
        next(variants)
    for (_, row), variant in zip(rows(p).items(), variants, strict=False):
        if not takes(strategy, microbatch_of(row), p):
            continue
        costs = RowCosts(model_of(p, "causal", variant), load_of(row, causal=True))
        costs = costs(strategy, ATTENTION, S)
        truth = measured(case_of(strategy, p, "causal", variant, row))
        found, peak = (
            kept + max(forward, backward)
            for kept, forward, backward in (
                (getattr(costs, name) for name in BYTES),
                (truth[name] for name in BYTES),
            )
        )
        excess.append(found / peak - 1)
    assert min(excess) >= -TOLERANCE, excess
    assert statistics.median(excess) <= 0.08 and max(excess) <= 0.25, excess


@pytest.mark.parametrize("share", [0.0, 0.03, 1.0])
@pytest.mark.parametrize("strategy", WALKED)
def test_what_is_kept_beyond_a_walk_stays_and_no_bytes_are_negative(strategy, share):
    """By norms of queries and keys, say: a share of the walk's, beside the norm of the layer."""
    p = 4
    sizes = model_of(p, "causal", "activations").packed.sizes
    z = dataclasses.replace(sizes, s=S)
    like = strategy.replace("local_z", "megatron_cz")
    kept, *peaks = attention_bytes(like, z)
    more = int(share * kept) + 2 * z.x
    for row in rows(p).values():
        if not takes(strategy, microbatch_of(row), p):
            continue
        without, beyond = (
            row_bytes.walked_row_bytes(
                strategy,
                like,
                OperationCosts(1.0, 1.0, found, *peaks),
                sizes,
                load_of(row, causal=True),
            )
            for found in (kept, kept + more)
        )
        assert beyond.kept_bytes == without.kept_bytes + more
        assert min(getattr(beyond, name) for name in BYTES) >= 0


def test_a_forward_ends_with_the_outputs_of_attention_and_layer():
    """With few key heads no moment of a row without exchange holds more; a ring's does."""
    p, s = 3, 1536
    z = LayerSizes(s=s, b=1, h=192, n=6, g=3, d=32, f=1, p=p)
    kept, forward, backward = attention_bytes("megatron_cz", z)
    one = OperationCosts(1.0, 1.0, kept + z.x, forward - z.x, backward - z.x)  # as a layer has it
    load = load_of(contiguous([s // 6] * 6, p), causal=True)
    found = row_bytes.walked_row_bytes("megatron_cz", "megatron_cz", one, z, load)
    assert found.kept_bytes == one.kept_bytes and found.forward_bytes >= z.x


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("strategy", ["colossal_z", "colossal_z+recompute"])
def test_fewer_columns_of_scores_leave_products_as_large(strategy, p):
    """In half types, where no walk tells: of latents, windows and dropout."""
    row, variant = contiguous([S // 2, S // 2], p), "shared keys"

    def alone(name):
        found = measured(case_of(name, p, "causal", variant, None))
        return OperationCosts(0.0, 0.0, *(found[quantity] for quantity in BYTES))

    least = alone(strategy.replace("colossal_z", "megatron_cz"))
    loads = load_of(row, causal=True), load_of_one(S, p, causal=True)
    sizes = model_of(p, "causal", variant).packed.sizes
    costs = row_bytes.with_row_bytes(
        strategy, alone(strategy), sizes, *loads, least=least, tiled_window=None
    )
    assert loads[0].keys_received < loads[1].keys_received
    assert not list(_off(costs, measured(case_of(strategy, p, "causal", variant, row))))


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
    costs = row_bytes.with_row_bytes(
        strategy, one, sizes, *loads, least=least, tiled_window=None, drops=True
    )
    assert not list(_off(costs, counted(strategy, row)))


@pytest.mark.parametrize("strategy", ["megatron_ts", "ulysses_z"])
def test_one_document_beside_padding_needs_room_as_many_do(strategy):
    p, variant = 2, "activations"
    row = zigzag((S - 3,), p)
    costs = RowCosts(model_of(p, "causal", variant), load_of(row, causal=True))
    costs = costs(strategy, ATTENTION, S)
    truth = measured(case_of(strategy, p, "causal", variant, row))
    assert not list(_off(costs, truth))


@pytest.mark.parametrize("g", [8, 2])
@pytest.mark.parametrize("like", ["megatron_cz", "ulysses_z"])
@pytest.mark.parametrize("suffix", ["", "+recompute"])
def test_where_flash_kernels_run_backwards_of_local_z_are_near_what_ranks_hold(like, g, suffix):
    """What the kernel holds of a document of all tokens is no other peak, which rows keep."""
    p, s = 4, 512
    rows_of_documents = [
        place([length] * (p * count), p, causal=True, alignment=s)
        for length, count in ((s // p - 5, 1), (s // (8 * p) - 2, 8))
    ]
    sizes = dataclasses.replace(model_of(p, "causal", "shared keys").packed.sizes, g=g)
    case = dataclasses.replace(case_of(like + suffix, p, "causal", "shared keys", None), s=s, g=g)
    with flash_kernel():
        one = OperationCosts(0.0, 0.0, *(measured.__wrapped__(case)[q] for q in BYTES))
        for row in rows_of_documents:
            of_row = dataclasses.replace(case, strategy="local_z" + suffix, row=row)
            truth = measured.__wrapped__(of_row)
            load = row_bytes.joined("local_z", load_of(row, causal=True))
            costs = row_bytes.walked_row_bytes(
                of_row.strategy, like + suffix, one, sizes, load, in_one_call=True
            )
            assert costs.kept_bytes == truth["kept_bytes"]
            peak = truth["kept_bytes"] + truth["backward_bytes"]
            excess = (costs.kept_bytes + costs.backward_bytes) / peak - 1
            assert -TOLERANCE < excess < 0.1


def _off(costs, truth, *labels):
    """What is kept and is not predicted, and peaks above the predicted ones."""
    if abs(costs.kept_bytes / truth["kept_bytes"] - 1) > TOLERANCE:
        yield *labels, "kept_bytes", costs.kept_bytes, truth["kept_bytes"]
    for name in BYTES[1:]:
        found, peak = costs.kept_bytes + getattr(costs, name), truth["kept_bytes"] + truth[name]
        if found < (1 - TOLERANCE) * peak:
            yield *labels, name, found, peak


@functools.cache
def measured_wide(case, groups):
    """Of each quantity the largest that any rank of all groups has."""
    p, world, found = case.p, groups * case.p, []
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            first = rank // p * p
            group, ranks, peers = (
                dist.new_group(list(of))
                for of in (range(first, first + p), range(world), range(rank % p, world, p))
            )
            found.append(measure_rank(group, case, wide=Wide(ranks, peers)))
        finally:
            dist.destroy_process_group()
    return {name: max(getattr(m, name) for m in found) for name in BYTES}


WIDE_NAMES = [name for name in NAMES if takes_wide(name)]


@pytest.mark.parametrize(
    ("strategy", "groups"),
    [(name, groups) for name in WIDE_NAMES for groups in ((2,) if recomputes(name) else (2, 4))],
)
def test_no_rank_of_a_wide_row_holds_more_than_predicted(strategy, groups):
    p, wrong = 4, []
    ranks = groups * p
    short = [5, 11, 2, 60, 1, 9, 6, 27 * groups, 3, 20, 7, 10]
    found = [zigzag((groups * S,), ranks), zigzag(short, ranks), contiguous([120, 40], ranks)]
    for row, variant in zip(itertools.cycle(found), VARIANTS, strict=False):
        row = dataclasses.replace(row, groups=groups)
        load = load_of(row, causal=True)
        costs = RowCosts(model_of(p, "causal", variant), load)
        costs = costs(strategy, ATTENTION, load.seq_length)
        case = dataclasses.replace(case_of(strategy, p, "causal", variant, row), s=row.seq_length)
        wrong += _off(costs, measured_wide(case, groups), row, variant)
    assert not wrong, "\n" + "\n".join(map(str, wrong))
