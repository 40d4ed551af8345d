"""How wrong the models are at lengths that they did not see.

    inside   each interior length left out in turn, and predicted from a fit of all others
    2x, 4x   fits of the lengths up to L, asked for the lengths near 2 L (1.5 to 3) and 4 L (3 to
             6), for every L that leaves at least five lengths, and half of them, to fit
With a held-out table: one fit of the whole table, asked for the lengths of the other one.

An error is |predicted - measured| over the measured value, or, where that is below a thousandth of
the largest value of the quantity, over that thousandth. Time is forward and backward together; the
two are rows of their own too; lengths of which only bytes were measured say nothing of it, nor are
they lengths that its fit saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_paradyse.costs.embedding_copy import embedding_copy
from megatron_paradyse.costs.fitting import MIN_LENGTHS, fit_operation, num_timed_lengths
from megatron_paradyse.costs.laws import SMALLEST
from megatron_paradyse.costs.layers import LAYER, half_of
from megatron_paradyse.costs.model import MODELS, CostModel
from megatron_paradyse.costs.table import (
    BYTE_QUANTITIES,
    QUANTITIES,
    TIME_QUANTITIES,
    Constants,
    CostTable,
    Measurement,
)
from megatron_paradyse.errors import UserError

TIME = "time_seconds"
REPORTED = (TIME, *QUANTITIES)
INSIDE, TWICE, FOUR_TIMES, FURTHER = "inside", "2x", "4x", "further"
SCOPES = (INSIDE, TWICE, FOUR_TIMES, FURTHER)
# Lengths from here to there times the longest fitted one are "2x" and "4x".
TWICE_FROM, FOUR_FROM, FOUR_TO = 1.5, 3.0, 6.0
MIN_LENGTHS_BEYOND = 5  # an extrapolation from fewer tells more of the number than of the model
_NO_CONSTANTS = Constants(static_bytes=0, optimizer_seconds=0)


@dataclass(frozen=True)
class Errors:
    """Relative errors of one model for one quantity of one operation in one scope."""

    model: str
    strategy: str
    operation: str
    quantity: str
    scope: str
    errors: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.errors))

    @property
    def p95(self) -> float:
        return float(np.percentile(self.errors, 95))

    @property
    def max(self) -> float:
        return max(self.errors)


@dataclass(frozen=True)
class _Question:
    """Points to fit, points to ask, what the answers count as, and of which quantities."""

    fitted: tuple[Measurement, ...]
    asked: tuple[Measurement, ...]
    scope: str
    names: tuple[str, ...] = REPORTED


def measure_accuracy(
    table: CostTable, held_out: CostTable | None = None, models: Sequence[str] = MODELS
) -> list[Errors]:
    """Errors per model, strategy, operation, quantity and scope; UserError if nothing can be asked.

    held_out must describe the same configuration (ask differences first).
    """
    copy = embedding_copy(table.description)
    other = {} if held_out is None else {(s, o): points for s, o, points in held_out.groups()}
    found: dict[tuple[str, str, str, str, str], list[float]] = {}
    for strategy, operation, points in table.groups():
        others = None if held_out is None else other.get((strategy, operation), ())
        largest = {name: max((getattr(m, name) for m in points), default=0.0) for name in REPORTED}
        for question in _questions(points, others):
            if num_timed_lengths(question.fitted) < MIN_LENGTHS:
                continue
            for model in models:
                fit = fit_operation(strategy, operation, question.fitted, model, table.description)
                fitted = CostModel(model, [fit], _NO_CONSTANTS, copy=copy)
                for m in question.asked:
                    answer = fitted.operation(strategy, operation, m.seq_length, m.batch_size)
                    for name in question.names:
                        if not m.is_timed and name not in BYTE_QUANTITIES:
                            continue
                        key = (model, strategy, operation, name, question.scope)
                        error = _error(getattr(answer, name), getattr(m, name), largest[name])
                        found.setdefault(key, []).append(error)
    if not found:
        raise UserError(
            f"no length can be held out: measure at {MIN_LENGTHS + 1} lengths or more, "
            "or give --held-out a table of other lengths"
        )
    return [Errors(*key, tuple(errors)) for key, errors in found.items()]


def _error(predicted: float, measured: float, largest: float) -> float:
    scale = max(measured, SMALLEST * largest)
    return abs(predicted - measured) / scale if scale else float(predicted > 0)


def _questions(
    points: tuple[Measurement, ...], others: Sequence[Measurement] | None
) -> Iterator[_Question]:
    """others: of a held-out table. Seconds are asked for as if only timed lengths were there."""
    timed = tuple(m for m in points if m.is_timed)
    kinds: list[tuple[tuple[Measurement, ...], tuple[str, ...]]] = [(points, REPORTED)]
    if len(timed) < len(points):
        kinds = [(timed, (TIME, *TIME_QUANTITIES)), (points, BYTE_QUANTITIES)]
    for of, names in kinds:
        left_out = [*_leave_one_out(of), *_beyond(of)] if others is None else _held_out(of, others)
        yield from (replace(question, names=names) for question in left_out)


def _leave_one_out(points: Sequence[Measurement]) -> Iterator[_Question]:
    lengths = sorted({m.seq_length for m in points})
    if len(lengths) <= MIN_LENGTHS:
        return
    for length in lengths[1:-1]:
        yield _Question(
            tuple(m for m in points if m.seq_length != length),
            tuple(m for m in points if m.seq_length == length),
            INSIDE,
        )


def _beyond(points: Sequence[Measurement]) -> Iterator[_Question]:
    lengths = sorted({m.seq_length for m in points})
    fewest = max(MIN_LENGTHS_BEYOND, (len(lengths) + 1) // 2)
    for longest in lengths[fewest - 1 : -1]:
        fitted = tuple(m for m in points if m.seq_length <= longest)
        for scope in (TWICE, FOUR_TIMES):
            asked = tuple(m for m in points if _scope(m.seq_length, longest) == scope)
            if asked:
                yield _Question(fitted, asked, scope)


def _held_out(
    points: tuple[Measurement, ...], others: Sequence[Measurement]
) -> Iterator[_Question]:
    lengths = {m.seq_length for m in points}
    if len(lengths) < MIN_LENGTHS:
        return
    seen = {(m.seq_length, m.batch_size) for m in points}
    for scope in SCOPES:
        asked = tuple(
            m
            for m in others
            if (m.seq_length, m.batch_size) not in seen
            and m.seq_length >= min(lengths)
            and _scope(m.seq_length, max(lengths)) == scope
        )
        if asked:
            yield _Question(points, asked, scope)


def _scope(length: int, longest: int) -> str | None:
    ratio = length / longest
    if ratio <= 1:
        return INSIDE
    if ratio < TWICE_FROM:
        return None
    return TWICE if ratio < FOUR_FROM else FOUR_TIMES if ratio <= FOUR_TO else FURTHER


def summarize(errors: Sequence[Errors]) -> dict[str, dict[str, float]]:
    """Per model: median, p95 and max of time and of memory in every scope that has errors.

    Keys are time_median, time_p95, time_max, memory_..., with _2x, _4x or _further beyond the
    range. Memory is all of BYTE_QUANTITIES together; layers are left out, as sums of the others.
    """
    summary: dict[str, dict[str, float]] = {}
    for model in dict.fromkeys(e.model for e in errors):
        rows = summary[model] = {}
        for scope in SCOPES:
            suffix = "" if scope == INSIDE else f"_{scope}"
            for kind, names in (("time", (TIME,)), ("memory", BYTE_QUANTITIES)):
                chosen = [
                    error
                    for e in errors
                    if (e.model, e.scope) == (model, scope)
                    and e.quantity in names
                    and half_of(e.operation) != LAYER
                    for error in e.errors
                ]
                if chosen:
                    rows[f"{kind}_median{suffix}"] = float(np.median(chosen))
                    rows[f"{kind}_p95{suffix}"] = float(np.percentile(chosen, 95))
                    rows[f"{kind}_max{suffix}"] = max(chosen)
    return summary


def to_json_values(errors: Sequence[Errors]) -> dict[str, Any]:
    """The summary and all rows, for --json."""
    rows = [
        {
            "model": e.model,
            "strategy": e.strategy,
            "operation": e.operation,
            "quantity": e.quantity,
            "scope": e.scope,
            "points": len(e.errors),
            "median": e.median,
            "p95": e.p95,
            "max": e.max,
        }
        for e in errors
    ]
    return {"summary": summarize(errors), "rows": rows}
