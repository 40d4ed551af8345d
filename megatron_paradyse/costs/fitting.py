"""From a table to a model: one fit per strategy, operation and quantity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_paradyse.costs.hybrid import HybridFit, fit_hybrid
from megatron_paradyse.costs.model import HYBRID, MODELS, CostModel, OperationFit
from megatron_paradyse.costs.paper import PaperFit, fit_paper
from megatron_paradyse.costs.table import (
    BYTE_QUANTITIES,
    QUANTITIES,
    TIME_QUANTITIES,
    CostTable,
    Measurement,
)
from megatron_paradyse.errors import UserError

MIN_LENGTHS = 3


def fit_table(table: CostTable, kind: str = HYBRID) -> CostModel:
    """Fit every operation that was measured at three lengths or more.

    Raises UserError when there is none. unfitted() says what was left out.
    """
    if kind not in MODELS:
        raise UserError(f"a model is one of {', '.join(MODELS)}, got {kind!r:.40}")
    fits = [
        fit_operation(strategy, operation, points, kind)
        for strategy, operation, points in table.groups()
        if _num_lengths(points) >= MIN_LENGTHS
    ]
    if not fits:
        raise UserError(
            f"nothing was measured at {MIN_LENGTHS} lengths or more: profile at more lengths"
        )
    return CostModel(kind, fits, table.constants)


def fit_operation(
    strategy: str, operation: str, points: Sequence[Measurement], kind: str
) -> OperationFit:
    """Fit the five quantities of one operation to its measurements."""
    s = np.array([m.seq_length for m in points], dtype=float)
    b = np.array([m.batch_size for m in points], dtype=float)
    columns = {name: np.array([getattr(m, name) for m in points], float) for name in QUANTITIES}
    fits: tuple[HybridFit, ...] | tuple[PaperFit, ...]
    if kind == HYBRID:
        kept = columns["kept_bytes"]
        fits = tuple(
            fit_hybrid(
                s,
                b,
                columns[name],
                operation=operation,
                is_time=name in TIME_QUANTITIES,
                kept=kept if name in BYTE_QUANTITIES[1:] else None,
            )
            for name in QUANTITIES
        )
    else:
        fits = tuple(fit_paper(s, b, columns[name]) for name in QUANTITIES)
    return OperationFit(strategy, operation, int(s.min()), int(s.max()), fits)


def unfitted(table: CostTable) -> list[str]:
    """One line for each operation that has too few measurements to fit, and why."""
    lines = []
    for strategy, operation, points in table.groups():
        if _num_lengths(points) >= MIN_LENGTHS:
            continue
        reasons = {
            m.status
            for m in table.measurements
            if (m.strategy, m.operation) == (strategy, operation) and not m.is_ok
        }
        why = f" ({'; '.join(sorted(reasons))})" if reasons else ""
        lines.append(f"{strategy} {operation}: {_num_lengths(points)} lengths{why}")
    return lines


def _num_lengths(points: Sequence[Measurement]) -> int:
    return len({m.seq_length for m in points})
