"""Embedding and loss head go in tiles of their own, other than those of the layers."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_paradyse.costs.fit_values import read_model, write_model
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.table import BYTE_QUANTITIES, CostTable, Measurement
from megatron_paradyse.strategies.sizes import TILE_ROWS
from tests.costs.step_by_step import hybrid_value
from tests.costs.synthetic import CONSTANTS, DESCRIPTION, make_table
from tests.simulator.small_models import GPT, simulated

EDGE_TILE = 2000
LAYER_TILE = TILE_ROWS * DESCRIPTION.p
LENGTHS = tuple(128 << i for i in range(11))  # on both sides of both tiles


def head(s: int) -> tuple[float, float, float]:
    """What is kept, and peaks of forward and backward above it; in tiles gradients are kept."""
    if s <= EDGE_TILE:
        return 30e3 * s, 13e3 * s, 150e6
    return 320e6 + 6e3 * s, 330e6, 157e6


def mlp(s: int) -> tuple[float, float, float]:
    return 64.0 * s, 1e6 + 2000.0 * min(s, LAYER_TILE), 1e6 + 3000.0 * min(s, LAYER_TILE)


def large_head(s: int) -> tuple[float, float, float]:
    """Of which a tile is much less than the whole, as a BERT's of 512 tokens."""
    return (8e3 * s, 9e3 * s, 1e6) if s <= EDGE_TILE else (1e6 + 300.0 * s, 9e6, 1e6)


def table_of(lengths=LENGTHS, tile: str = str(EDGE_TILE), head=head) -> CostTable:
    points = [
        Measurement(strategy, operation, s, 1, "ok", 1e-6 * s, 1e-6 * s, *map(float, sizes(s)))
        for strategy, operation, sizes in (("model", "head", head), ("metp", "mlp", mlp))
        for s in lengths
    ]
    description = dataclasses.replace(DESCRIPTION, head_tile=tile)
    return CostTable(description, tuple(points), CONSTANTS)


def peaks(costs) -> tuple[float, float, float]:
    kept = costs.kept_bytes
    return kept, kept + costs.forward_bytes, kept + costs.backward_bytes


def test_bytes_of_either_are_told_on_both_sides_of_its_tile():
    table = table_of()
    model = fit_table(table)
    again = read_model(json.loads(json.dumps(write_model(model))), table)
    for s in (*LENGTHS, EDGE_TILE, EDGE_TILE + 1, LAYER_TILE, LAYER_TILE + 1, 1 << 20):
        for name, operation, sizes in (("model", "head", head), ("metp", "mlp", mlp)):
            found = model.operation(name, operation, s)
            truth = sizes(s)
            for quantity, value in zip(BYTE_QUANTITIES, truth, strict=True):
                assert getattr(found, quantity) == pytest.approx(value, rel=1e-3, abs=1e3)
            assert again.operation(name, operation, s) == found
    for s, b in ((900, 2), (1001, 2), (LAYER_TILE // 2, 2), (LAYER_TILE // 2 + 1, 2)):
        for fit in model.fits:
            kept, _, peak = (hybrid_value(one, s, b, fit.max_length) for one in fit.fits[2:])
            assert model.operation(fit.strategy, fit.operation, s, b).backward_bytes == peak - kept


@pytest.mark.parametrize("lengths", [(128, 400, 1280, 4096), (1280, 4096, 12800, 40960)])
def test_with_one_length_on_a_side_no_peak_of_a_head_is_missed(lengths):
    """As a quick profile has it: at the lengths measured, and far from them."""
    model = fit_table(table_of(lengths))
    for s in (64, *lengths, 4 * lengths[-1], 1 << 20):
        truth = head(s)
        found = peaks(model.operation("model", "head", s))
        assert found[0] >= 0.98 * truth[0] or s < lengths[0]
        assert max(found) >= 0.98 * (truth[0] + max(truth[1:]))


@pytest.mark.parametrize("of", [head, large_head])
@pytest.mark.parametrize("lengths", [(128, 400, 1280, 4096), (1280, 4096, 12800, 40960)])
def test_a_lone_length_on_a_side_is_told_exactly_and_others_are_bounded(lengths, of):
    """Whether the law of the other side is above its bytes there or below."""
    model = fit_table(table_of(lengths, head=of))

    def found_and_true(s: int) -> list[float]:
        kept, *above = of(s)
        return [max(peaks(model.operation("model", "head", s))), kept + max(above)]

    for s in lengths:
        found, true = found_and_true(s)
        assert found == pytest.approx(true, rel=5e-3), s
    for s in (64, 1000, 1999, 2001, 3000, 8000, 1 << 20):
        found, true = found_and_true(s)
        assert found >= 0.99 * true, s


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"head_tile": "4096"}, 4096),
        ({"head_tile": "off"}, float("inf")),
        ({"head_tile": "4096", "p": 1}, float("inf")),
        ({"head_tile": None}, 2**28 // (128 * 4 + 4 * 256 * 4)),  # as files of earlier versions
        ({"head_tile": None, "dtype": "float8"}, float("inf")),
    ],
)
def test_a_file_tells_the_tokens_of_their_tile(changes, tokens):
    assert dataclasses.replace(DESCRIPTION, **changes).edge_tile_tokens == tokens


def test_without_a_tile_there_is_one_law():
    table = make_table()
    table = dataclasses.replace(table, description=table_of(tile="off").description)
    model = fit_table(table)
    assert not any(fit.law.in_tiles for fit in model.fits_of("model", "head"))


def test_the_second_tile_of_a_head_grows_up_to_twice_the_tokens_of_one():
    """Its peak, by 3,000 bytes a token there and by 150 from there on; of two sequences too."""

    def peak(tokens: float) -> float:
        return 2.2e6 + 150.0 * tokens + 3000.0 * min(tokens, 2 * EDGE_TILE)

    def points(s: int) -> tuple[float, float, float]:
        return (4e3 * s, 1e3 * s, 0.0) if s <= EDGE_TILE else (100.0 * s, peak(s) - 100.0 * s, 0.0)

    lengths = (500, 1000, 2500, 5000, 12000)
    table = table_of(lengths)
    changed = [
        dataclasses.replace(m, **dict(zip(BYTE_QUANTITIES, points(m.seq_length), strict=True)))
        for m in table.measurements
        if m.operation == "head"
    ]
    table = dataclasses.replace(table, measurements=tuple(changed))
    model = fit_table(table)
    again = read_model(json.loads(json.dumps(write_model(model))), table)
    for s, b in [*((s, 1) for s in (2001, 2500, 4000, 4001, 1 << 20)), (1500, 2), (5000, 3)]:
        found = model.operation("model", "head", s, b)
        assert peaks(found)[1] == pytest.approx(peak(s * b), rel=1e-6)
        assert again.operation("model", "head", s, b) == found
        (fit,) = model.fits
        assert hybrid_value(fit.fits[3], s, b, fit.max_length) == pytest.approx(peak(s * b))


@pytest.mark.parametrize("dtype", [(), ("--bf16",)], ids=["float32", "bfloat16"])
def test_edges_of_a_model_hold_what_costs_of_other_lengths_say(dtype, tmp_path):
    """Of embedding and head, each in one tile of 256 tokens or in several."""
    lengths, others = (96, 192, 320, 640, 1536), (128, 256, 512, 1024, 2048)
    more = {"lengths": (*lengths, *others), "strategies": ("megatron_ts",)}
    flags = [*GPT[:-2], *dtype, "--vocab-size", 4096, "--paradyse-head-tile", 256]
    flags += ["--seq-length", 2048, "--max-position-embeddings", 2048]
    table = simulated(tmp_path, flags, 2, **more)
    fitted = tuple(m for m in table.measurements if m.seq_length in lengths)
    model = fit_table(dataclasses.replace(table, measurements=fitted))
    for m in table.measurements:
        if m.strategy == "model":
            found = peaks(model.operation("model", m.operation, m.seq_length))
            assert found == pytest.approx(peaks(m.costs), rel=0.02), (m.operation, m.seq_length)
