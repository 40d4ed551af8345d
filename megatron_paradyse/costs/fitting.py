"""From a table to a model: one fit per strategy, operation and quantity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from megatron_paradyse.costs.description import Description
from megatron_paradyse.costs.embedding_copy import embedding_copy
from megatron_paradyse.costs.hybrid import HybridFit, fit_hybrid
from megatron_paradyse.costs.laws import Array
from megatron_paradyse.costs.layers import LAYER, half_of
from megatron_paradyse.costs.model import HYBRID, MODELS, CostModel, OperationFit, timed_ranges
from megatron_paradyse.costs.offloaded import host_link
from megatron_paradyse.costs.packed import (
    AS_LOCAL,
    LOCAL,
    MIN_ROWS,
    Packed,
    PackedFit,
    work_of,
)
from megatron_paradyse.costs.paper import PaperFit, fit_paper
from megatron_paradyse.costs.row_bounds import TILE
from megatron_paradyse.costs.row_law import RowPoints, fit_row_law
from megatron_paradyse.costs.row_sizes import packed_of
from megatron_paradyse.costs.rows import RowMeasurement
from megatron_paradyse.costs.table import (
    ATTENTION,
    BYTE_QUANTITIES,
    MODEL,
    PREDICTION,
    QUANTITIES,
    TIME_QUANTITIES,
    CostTable,
    Measurement,
)
from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies import base_name
from megatron_paradyse.strategies.accounting import RINGS
from megatron_paradyse.strategies.sizes import TILE_ROWS, shortest_narrow

MIN_LENGTHS = 3


def fit_table(table: CostTable, kind: str = HYBRID) -> CostModel:
    """Fit every operation that was timed at three lengths or more, and then the packed rows.

    Raises UserError when there is none. unfitted() says what was left out.
    """
    if kind not in MODELS:
        raise UserError(f"a model is one of {', '.join(MODELS)}, got {kind!r:.40}")
    fits = [
        fit_operation(strategy, operation, points, kind, table.description)
        for strategy, operation, points in table.groups()
        if num_timed_lengths(points) >= MIN_LENGTHS
    ]
    if not fits:
        raise UserError(
            f"nothing was measured at {MIN_LENGTHS} lengths or more: profile at more lengths"
        )
    copy = embedding_copy(table.description)
    model = CostModel(kind, fits, table.constants, host_link(table), copy=copy)
    packed = packed_of(table.description)
    found = fit_rows(model, table.rows, packed)
    return model.with_rows(dataclasses.replace(packed, fits=found))


def fit_rows(
    model: CostModel, rows: Sequence[RowMeasurement], packed: Packed
) -> dict[str, PackedFit]:
    """The laws of each strategy of which four rows or more were measured, by its name.

    model, packed: of single documents.
    """
    found: dict[str, PackedFit] = {}
    for strategy in dict.fromkeys(m.strategy for m in rows):
        own = [m for m in rows if m.strategy == strategy and m.is_ok]
        names = [name for name in (strategy, *AS_LOCAL) if name in model.strategies(ATTENTION)]
        if len(own) < MIN_ROWS or (strategy not in names and strategy != LOCAL) or not names:
            continue
        ones = [packed.load_of_one(m.load.seq_length, m.load.p) for m in own]
        s = np.array([float(m.load.seq_length) for m in own])
        laws = []
        for name, fit in zip(TIME_QUANTITIES, model.fits_of(names[0], ATTENTION), strict=False):
            windowed = packed.counts_window(strategy, ATTENTION, fit)
            work = np.array([work_of(strategy, m.load.seen(windowed)) for m in own])
            of_one = np.array([work_of(strategy, load.seen(windowed)) for load in ones])
            measured = np.array([getattr(m, name) for m in own])
            one = [model.predict(names[0], ATTENTION, name, m.load.seq_length) for m in own]
            laws.append(fit_row_law(RowPoints(measured, np.array(one), s, work, of_one)))
        found[strategy] = PackedFit(strategy, names[0], len(own), *laws)
    return found


def fit_operation(
    strategy: str,
    operation: str,
    points: Sequence[Measurement],
    kind: str,
    d: Description,
) -> OperationFit:
    """Fit the five quantities of one operation to its measurements, seconds to the timed ones.

    A tile of 64 queries sees 63 more keys than the window has, in a kernel call of the whole
    sequence, a rank's part, or half of that.
    """
    p, window = d.p, d.window(operation)
    # Forests draw by place: the order in which a table tells its points must not matter.
    points = sorted(points, key=lambda m: (m.seq_length, m.batch_size))

    def values(name: str, of: str) -> Array:
        is_time = of in TIME_QUANTITIES
        return np.array([getattr(m, name) for m in points if m.is_timed or not is_time], float)

    def where(of: str) -> tuple[Array, Array]:
        return values("seq_length", of), values("batch_size", of)

    fits: tuple[HybridFit, ...] | tuple[PaperFit, ...]
    if kind == HYBRID:
        fits = tuple(
            fit_hybrid(
                *where(name),
                values(name, name),
                operation=operation,
                is_time=name in TIME_QUANTITIES,
                kept=values("kept_bytes", name) if name in BYTE_QUANTITIES[1:] else None,
                tile_tokens=d.edge_tile_tokens if strategy == MODEL else TILE_ROWS * p,
                whole_tokens=2 * d.edge_tile_tokens if strategy == MODEL else math.inf,
                window=window,
                reaches=[parts * (window + TILE - 1) for parts in (1, p, 2 * p)],
                bend=_bend(strategy, operation, d),
                bend_of_tokens=operation == PREDICTION,
            )
            for name in QUANTITIES
        )
    else:
        fits = tuple(fit_paper(*where(name), values(name, name)) for name in QUANTITIES)
    lengths = [m.seq_length for m in points]
    shortest, longest = min(lengths), max(lengths)
    return OperationFit(strategy, operation, shortest, longest, fits, timed_ranges(points))


def _bend(strategy: str, operation: str, d: Description) -> float:
    """From where on there may be laws of their own.

    The shortest such sequence of rings of attention beside a window; and of multi-token prediction
    tokens, as its projection is of a rank's own rows where there are more than channels
    (prediction.py).
    """
    if operation == PREDICTION:
        return d.model.hidden_size + 1 if d.p > 1 else math.inf
    return shortest_narrow(d.window(operation), d.p) if base_name(strategy) in RINGS else math.inf


def unfitted(table: CostTable) -> list[str]:
    """One line for each operation that has too few measurements to fit, and why.

    Not of whole layers: a profile measures few of them, as a check of the sum of their halves.
    """
    lines = []
    for strategy, operation, points in table.groups():
        if num_timed_lengths(points) >= MIN_LENGTHS or half_of(operation) == LAYER:
            continue
        reasons = {
            m.status
            for m in table.measurements
            if (m.strategy, m.operation) == (strategy, operation) and not m.is_ok
        }
        why = f" ({'; '.join(sorted(reasons))})" if reasons else ""
        lines.append(f"{strategy} {operation}: {num_timed_lengths(points)} lengths{why}")
    return lines


def num_timed_lengths(points: Sequence[Measurement]) -> int:
    return len({m.seq_length for m in points if m.is_timed})
