"""A fitted model as plain values of a cost file, and back, with everything checked.

laws: LAWS of the version that fitted it; missing: 1. Per operation: strategy, operation,
min_length, max_length (of the measurements that were fitted), and fits, by quantity:

    hybrid   pieces   up to 3 arrays of 4 numbers >= 0: coefficients of 1, b, s b, s^2 b
             factors  null, or a step table of 0.5 to 1.5
             in_tiles where there is one: pieces for s b > tokens
             window   where there is one: keys that a query sees
             reach    where there is one: keys of a tile, of which the last coefficient is then;
                      without a window tokens
             beyond   where there is one: "from", and of s >= from pieces, in_tiles, window,
                      reach; or "from_tokens", of s b
             The fits of workspace are of its peak: forward_peak_bytes, backward_peak_bytes.
    paper    values   a step table
             polynomials   per batch size of values, up to 4 coefficients of 1, s, s^2, s^3

packed, missing where no rows were fitted, has per strategy: strategy, like, num_rows, forward and
backward: factors in the order of row_law.FACTORS, and forward_floor and backward_floor: constant,
per token, document and peer, each at least 0; floors that are missing are nothing.

A step table is {edges, batch_sizes, rows}: rows[i][k] holds at batch_sizes[i] for
edges[k-1] <= s < edges[k].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from megatron_paradyse.costs.embedding_copy import embedding_copy
from megatron_paradyse.costs.forest import StepTable
from megatron_paradyse.costs.hybrid import MAX_RESIDUAL, HybridFit
from megatron_paradyse.costs.laws import MAX_PIECES, NUM_TERMS, Law
from megatron_paradyse.costs.model import HYBRID, MODELS, CostModel, OperationFit, timed_ranges
from megatron_paradyse.costs.offloaded import host_link
from megatron_paradyse.costs.packed import Packed, PackedFit
from megatron_paradyse.costs.paper import MAX_ORDER, PaperFit
from megatron_paradyse.costs.row_law import FACTORS, NOTHING, RowLaw
from megatron_paradyse.costs.row_sizes import packed_of
from megatron_paradyse.costs.strict import (
    ContentError,
    check_array,
    check_integer,
    check_keys,
    check_numbers,
    check_text,
)
from megatron_paradyse.costs.table import (
    ATTENTION,
    MAX_BATCH_SIZE,
    MAX_QUANTITY,
    MAX_SEQ_LENGTH,
    MODEL,
    QUANTITIES,
    CostTable,
    Measurement,
)

Measured = Mapping[tuple[str, str], Sequence[Measurement]]  # (strategy, operation) -> what is ok

# One more with each change after which the same measurements are fitted otherwise.
LAWS = 4
MAX_LAWS = 1 << 20
MAX_OPERATIONS = 500
MAX_EDGES = 500
MAX_BATCH_SIZES = 1000
MAX_COEFFICIENT = 1e30
MAX_TILE_TOKENS = 1 << 40
MAX_BEND = 4 * MAX_SEQ_LENGTH  # of two ranks, which bend last, and the longest window
PACKED_KEYS = ("strategy", "like", "num_rows", "forward", "backward")
FLOOR_KEYS = ("forward_floor", "backward_floor")
OPERATION_KEYS = ("strategy", "operation", "min_length", "max_length", "fits")
FROM, FROM_TOKENS = "from", "from_tokens"
LAW_KEYS = ("in_tiles", "window", "reach")  # a law may have
HYBRID_KEYS = (*QUANTITIES[:3], "forward_peak_bytes", "backward_peak_bytes")


def write_model(model: CostModel) -> dict[str, Any]:
    """The model as values for JSON."""
    names = HYBRID_KEYS if model.kind == HYBRID else QUANTITIES
    operations = [
        {
            "strategy": fit.strategy,
            "operation": fit.operation,
            "min_length": fit.min_length,
            "max_length": fit.max_length,
            "fits": dict(zip(names, map(_fit_values, fit.fits), strict=True)),
        }
        for fit in model.fits
    ]
    fits = model.packed.fits.values() if model.packed is not None else ()
    packed = [_row_values(fit) for fit in fits]
    values = {"kind": model.kind, "laws": LAWS, "operations": operations}
    return values | ({"packed": packed} if packed else {})


def _row_values(fit: PackedFit) -> dict[str, Any]:
    laws = (fit.forward, fit.backward)
    values = (fit.strategy, fit.like, fit.num_rows, *(law.factors for law in laws))
    return dict(zip(PACKED_KEYS + FLOOR_KEYS, (*values, *(law.floor for law in laws)), strict=True))


def _fit_values(fit: HybridFit | PaperFit) -> dict[str, Any]:
    if isinstance(fit, HybridFit):
        factors = None if fit.factors is None else _table_values(fit.factors)
        values = {**_law_values(fit.law), "factors": factors}
        if fit.law.beyond is not None:
            start = FROM_TOKENS if fit.law.bend_of_tokens else FROM
            values["beyond"] = {start: int(fit.law.bend), **_law_values(fit.law.beyond)}
        return values
    return {"values": _table_values(fit.values), "polynomials": fit.polynomials}


def _law_values(law: Law) -> dict[str, Any]:
    """But for what lies beyond its bend."""
    values: dict[str, Any] = {"pieces": law.pieces}
    if law.in_tiles:
        values["in_tiles"] = {"tokens": law.tile_tokens, "pieces": law.in_tiles}
    seen = {"window": law.window, "reach": law.reach}
    return values | {name: int(keys) for name, keys in seen.items() if math.isfinite(keys)}


def _table_values(table: StepTable) -> dict[str, Any]:
    return {"edges": table.edges, "batch_sizes": table.batch_sizes, "rows": table.rows}


def read_model(value: Any, table: CostTable) -> CostModel:
    """The model of these values, which must be of this table; ContentError otherwise."""
    values = check_keys(value, "model", ("kind", "operations"), optional=("packed", "laws"))
    kind = values["kind"]
    if kind not in MODELS:
        raise ContentError(f"model.kind must be one of {', '.join(MODELS)}, got {kind!r:.40}")
    items = check_array(values["operations"], "model.operations", max_items=MAX_OPERATIONS)
    measured = {(strategy, operation): points for strategy, operation, points in table.groups()}
    fits: dict[tuple[str, str], OperationFit] = {}
    for i, item in enumerate(items):
        where = f"model.operations[{i}]"
        fit = _read_operation(item, where, kind, measured)
        name = (fit.strategy, fit.operation)
        if name in fits:
            raise ContentError(f"{where} is a second fit of the {fit.operation} of {fit.strategy}")
        fits[name] = fit
    _check_laws(fits.values())
    packed = _read_packed(values.get("packed", []), table, fits)
    copy = embedding_copy(table.description)
    return CostModel(kind, tuple(fits.values()), table.constants, host_link(table), packed, copy)


def read_laws(value: Mapping[str, Any]) -> int:
    """Of a model's values: by which LAWS it was fitted."""
    return check_integer(value.get("laws", 1), "model.laws", low=1, high=MAX_LAWS)


def _check_laws(fits: Collection[OperationFit]) -> None:
    """Of one tile and one bend of the layers, and of the model's edges."""
    for edges in (True, False):
        hybrid = [
            one
            for fit in fits
            for one in fit.fits
            if isinstance(one, HybridFit) and (fit.strategy == MODEL) == edges
        ]
        laws = [one.law for one in hybrid] + [one.law.beyond for one in hybrid if one.law.beyond]
        tiles = {law.tile_tokens for law in laws if law.in_tiles}
        if len(tiles) > 1:
            raise ContentError(f"model has tiles of {sorted(tiles)} tokens: all are of one size")
        bends = {(law.bend, law.bend_of_tokens) for law in laws if law.beyond}
        if len(bends) > 1:
            starts = sorted(bend for bend, _ in bends)
            raise ContentError(f"model has laws beyond {starts}: all begin at one length")


def _read_packed(value: Any, table: CostTable, fits: Collection[tuple[str, str]]) -> Packed:
    """fits: what single documents were fitted of."""
    read: dict[str, PackedFit] = {}
    for i, item in enumerate(check_array(value, "model.packed", max_items=MAX_OPERATIONS)):
        where = f"model.packed[{i}]"
        has_floors = isinstance(item, dict) and FLOOR_KEYS[0] in item
        fields = check_keys(item, where, PACKED_KEYS + (FLOOR_KEYS if has_floors else ()))
        strategy = check_text(fields["strategy"], f"{where}.strategy")
        like = check_text(fields["like"], f"{where}.like")
        count = sum(m.strategy == strategy and m.is_ok for m in table.rows)
        if strategy in read or fields["num_rows"] != count or (like, ATTENTION) not in fits:
            raise ContentError(f"{where} was not fitted to the rows and the model of this file")
        numbers = {
            name: check_numbers(
                fields.get(name, list(NOTHING)),
                f"{where}.{name}",
                low=0,
                high=MAX_COEFFICIENT,
                max_items=len(FACTORS),
                length=len(FACTORS),
            )
            for name in ("forward", "backward", *FLOOR_KEYS)
        }
        laws = (RowLaw(numbers[name], numbers[f"{name}_floor"]) for name in ("forward", "backward"))
        read[strategy] = PackedFit(strategy, like, count, *laws)
    return dataclasses.replace(packed_of(table.description), fits=read)


def _read_operation(value: Any, where: str, kind: str, measured: Measured) -> OperationFit:
    values = check_keys(value, where, OPERATION_KEYS)
    strategy = check_text(values["strategy"], f"{where}.strategy")
    operation = check_text(values["operation"], f"{where}.operation")
    shortest = check_integer(
        values["min_length"], f"{where}.min_length", low=1, high=MAX_SEQ_LENGTH
    )
    longest = check_integer(
        values["max_length"], f"{where}.max_length", low=shortest, high=MAX_SEQ_LENGTH
    )
    points = measured.get((strategy, operation), ())
    lengths = {m.seq_length for m in points} or {0}
    timed = timed_ranges(points)
    if (min(lengths), max(lengths)) != (shortest, longest) or not timed:
        raise ContentError(f"{where} was not fitted to the lengths of these measurements")
    names = HYBRID_KEYS if kind == HYBRID else QUANTITIES
    fits = check_keys(values["fits"], f"{where}.fits", names)
    read = _read_hybrid if kind == HYBRID else _read_paper
    return OperationFit(
        strategy,
        operation,
        shortest,
        longest,
        tuple(read(fits[name], f"{where}.fits.{name}") for name in names),  # type: ignore[arg-type]
        timed,
    )


def _read_hybrid(value: Any, where: str) -> HybridFit:
    values = check_keys(value, where, ("pieces", "factors"), optional=("beyond", *LAW_KEYS))
    law = _read_law(values, where)
    if "beyond" in values:
        where_beyond = f"{where}.beyond"
        of_tokens = isinstance(values["beyond"], dict) and FROM_TOKENS in values["beyond"]
        start = FROM_TOKENS if of_tokens else FROM
        beyond = check_keys(values["beyond"], where_beyond, (start, "pieces"), optional=LAW_KEYS)
        bend = check_integer(beyond[start], f"{where_beyond}.{start}", low=1, high=MAX_BEND)
        law = dataclasses.replace(
            law, beyond=_read_law(beyond, where_beyond), bend=bend, bend_of_tokens=of_tokens
        )
    if values["factors"] is None:
        return HybridFit(law)
    low, high = 1 - MAX_RESIDUAL, 1 + MAX_RESIDUAL
    return HybridFit(law, _read_table(values["factors"], f"{where}.factors", low=low, high=high))


def _read_law(values: Mapping[str, Any], where: str) -> Law:
    law = Law(_read_pieces(values["pieces"], f"{where}.pieces"))
    if "window" in values:
        keys = check_integer(values["window"], f"{where}.window", low=1, high=MAX_SEQ_LENGTH)
        law = dataclasses.replace(law, window=keys)
    if "reach" in values:
        keys = check_integer(values["reach"], f"{where}.reach", low=1, high=MAX_TILE_TOKENS)
        law = dataclasses.replace(law, reach=keys)
    if "in_tiles" in values:
        where_tiles = f"{where}.in_tiles"
        tiles = check_keys(values["in_tiles"], where_tiles, ("tokens", "pieces"))
        tokens = check_integer(
            tiles["tokens"], f"{where_tiles}.tokens", low=1, high=MAX_TILE_TOKENS
        )
        pieces = _read_pieces(tiles["pieces"], f"{where_tiles}.pieces")
        if not pieces:
            raise ContentError(f"{where_tiles}.pieces must not be empty")
        law = dataclasses.replace(law, in_tiles=pieces, tile_tokens=tokens)
    return law


def _read_pieces(value: Any, where: str) -> tuple[tuple[float, ...], ...]:
    return tuple(
        check_numbers(
            piece, where, low=0.0, high=MAX_COEFFICIENT, max_items=NUM_TERMS, length=NUM_TERMS
        )
        for piece in check_array(value, where, max_items=MAX_PIECES)
    )


def _read_paper(value: Any, where: str) -> PaperFit:
    values = check_keys(value, where, ("values", "polynomials"))
    table = _read_table(values["values"], f"{where}.values", low=-MAX_QUANTITY, high=MAX_QUANTITY)
    rows = check_array(
        values["polynomials"],
        f"{where}.polynomials",
        max_items=MAX_BATCH_SIZES,
        length=len(table.rows),
    )
    return PaperFit(
        table,
        tuple(
            check_numbers(
                row,
                f"{where}.polynomials",
                low=-MAX_COEFFICIENT,
                high=MAX_COEFFICIENT,
                max_items=MAX_ORDER + 1,
            )
            for row in rows
        ),
    )


def _read_table(value: Any, where: str, *, low: float, high: float) -> StepTable:
    values = check_keys(value, where, ("edges", "batch_sizes", "rows"))
    edges = check_numbers(
        values["edges"], f"{where}.edges", low=0, high=MAX_SEQ_LENGTH, max_items=MAX_EDGES
    )
    sizes = check_array(values["batch_sizes"], f"{where}.batch_sizes", max_items=MAX_BATCH_SIZES)
    for size in sizes:
        check_integer(size, f"{where}.batch_sizes", low=1, high=MAX_BATCH_SIZE)
    for name, items in (("edges", edges), ("batch_sizes", sizes)):
        if any(a >= b for a, b in pairwise(items)):
            raise ContentError(f"{where}.{name} must ascend")
    if not sizes:
        raise ContentError(f"{where}.batch_sizes must not be empty")
    rows = check_array(
        values["rows"], f"{where}.rows", max_items=MAX_BATCH_SIZES, length=len(sizes)
    )
    return StepTable(
        edges,
        tuple(sizes),
        tuple(
            check_numbers(
                row,
                f"{where}.rows",
                low=low,
                high=high,
                max_items=MAX_EDGES + 1,
                length=len(edges) + 1,
            )
            for row in rows
        ),
    )
