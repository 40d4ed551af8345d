"""How wrong the costs of packed rows are, for rows that the factors were not fitted to.

Seconds, forward and backward together, by the factors of the strategy's other rows ("fitted") and
by the laws of single documents alone ("derived"). Bytes do not depend on the factors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_paradyse.costs.fitting import fit_rows, fit_table
from megatron_paradyse.costs.model import CostModel
from megatron_paradyse.costs.row_costs import RowCosts
from megatron_paradyse.costs.rows import RowMeasurement
from megatron_paradyse.costs.table import ATTENTION, CostTable
from megatron_paradyse.errors import UserError

FITTED, DERIVED = "fitted", "derived"


@dataclass(frozen=True)
class RowError:
    """One row of one strategy. time: |predicted - measured| / measured; kept_bytes: likewise;
    peak_bytes: (predicted - measured) / measured of the larger peak, below 0 where it was missed.
    """

    strategy: str
    seq_length: int
    documents: int
    form: str
    time: float
    kept_bytes: float
    peak_bytes: float


def measure_row_accuracy(table: CostTable, held_out: CostTable | None = None) -> list[RowError]:
    """Each row left out in turn, or with held_out its rows asked of all of table's; may be none."""
    asked = [m for m in (table if held_out is None else held_out).rows if m.is_ok]
    if not asked:
        return []
    single = fit_table(dataclasses.replace(table, rows=()))
    errors = [_error(single, m, DERIVED) for m in asked]
    if held_out is not None:
        errors += [_error(*pair, FITTED) for pair in _not_fitted(fit_table(table), table, asked)]
    else:
        errors += [_error(*pair, FITTED) for pair in _left_out(single, table.rows)]
    return [error for error in errors if error is not None]


def _not_fitted(
    model: CostModel, table: CostTable, asked: Sequence[RowMeasurement]
) -> Iterator[tuple[CostModel, RowMeasurement]]:
    """The model, of table, with each row asked that it has factors for and was not fitted to."""
    assert model.packed is not None
    seen = {(m.strategy, m.load) for m in table.rows if m.is_ok}
    for row in asked:
        if row.strategy in model.packed.fits and (row.strategy, row.load) not in seen:
            yield model, row


def _left_out(
    single: CostModel, rows: Sequence[RowMeasurement]
) -> Iterator[tuple[CostModel, RowMeasurement]]:
    """Models of all rows of a strategy but one, which tells of that one if enough are left."""
    packed = single.packed
    assert packed is not None
    for row in (m for m in rows if m.is_ok):
        others = [m for m in rows if m.strategy == row.strategy and m.load != row.load]
        fits = fit_rows(single, others, packed)
        if fits:
            yield single.with_rows(dataclasses.replace(packed, fits=fits)), row


def _error(model: CostModel, m: RowMeasurement, form: str) -> RowError | None:
    try:
        costs = RowCosts(model, m.load)(m.strategy, ATTENTION, m.load.seq_length)
    except UserError:  # nothing tells of this strategy
        return None
    found, truth = (c.kept_bytes + max(c.forward_bytes, c.backward_bytes) for c in (costs, m))
    return RowError(
        m.strategy,
        m.load.seq_length,
        m.load.documents,
        form,
        abs(costs.time_seconds / m.time_seconds - 1),
        abs(costs.kept_bytes - m.kept_bytes) / max(m.kept_bytes, 1.0),
        (found - truth) / max(truth, 1.0),
    )


def summarize_rows(errors: Sequence[RowError]) -> dict[str, dict[str, Any]]:
    """Per form: rows, time_median, time_p95, time_max, kept_max, and of peaks least and median.

    kept_max_of, peak_least_of: the strategy, tokens and documents of that row.
    """
    summary: dict[str, dict[str, Any]] = {}
    for form in dict.fromkeys(error.form for error in errors):
        of = [error for error in errors if error.form == form]
        times = np.array([error.time for error in of])
        peaks = np.array([error.peak_bytes for error in of])
        summary[form] = {
            "rows": len(of),
            "time_median": float(np.median(times)),
            "time_p95": float(np.percentile(times, 95)),
            "time_max": float(times.max()),
            "kept_max": max(error.kept_bytes for error in of),
            "kept_max_of": _named(max(of, key=lambda error: error.kept_bytes)),
            "peak_least": float(peaks.min()),
            "peak_least_of": _named(min(of, key=lambda error: error.peak_bytes)),
            "peak_median": float(np.median(peaks)),
        }
    return summary


def _named(error: RowError) -> str:
    return f"{error.strategy}, {error.seq_length} tokens, {error.documents} documents"


def row_lines(errors: Sequence[RowError]) -> list[str]:
    """What is printed of them, a line for each form and strategy."""
    lines = []
    for form, all_ in summarize_rows(errors).items():
        lines.append(
            f"packed rows, {form} ({all_['rows']:.0f}): time median {all_['time_median']:.1%}, 95% "
            f"{all_['time_p95']:.1%}, largest {all_['time_max']:.1%}; kept bytes off by at most "
            f"{all_['kept_max']:.2%} ({all_['kept_max_of']}); peaks {all_['peak_least']:+.1%} at "
            f"least ({all_['peak_least_of']}), {all_['peak_median']:+.1%} at the median"
        )
        for strategy in dict.fromkeys(e.strategy for e in errors):
            times = [e.time for e in errors if (e.strategy, e.form) == (strategy, form)]
            if times:
                lines.append(f"  {strategy}: median {np.median(times):.1%}, most {max(times):.1%}")
    return lines
