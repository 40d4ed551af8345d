"""The records of a trace (train/trace.py writes them), read as if an enemy had written them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_paradyse.costs.description import Hardware
from megatron_paradyse.costs.layers import MAX_LAYERS
from megatron_paradyse.costs.rows import LATER_BUFFER_KEYS
from megatron_paradyse.costs.strict import (
    MAX_INTEGER,
    ContentError,
    check_array,
    check_fields,
    check_integer,
    check_number,
    check_text,
)
from megatron_paradyse.costs.table import MAX_QUANTITY
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import Load
from megatron_paradyse.plan import Plan, parse_runs
from megatron_paradyse.planner.from_costs import Stage
from megatron_paradyse.strategies.row_sizes import RowSizes
from megatron_paradyse.units import MAX_BATCH_SIZE, MAX_SEQ_LENGTH

MOST_PLAN_CHARACTERS = 16_384
MOST_FACTORS = 200
MOST_RANKS = 1 << 14  # over which a row lies
MOST_STAGES = 64  # of a rank: one, or its virtual pipeline chunks


@dataclass(frozen=True)
class Run:
    """One start of a training. memory_budget_bytes: None without a limit.

    place: which replica and which pipeline stage writes; None in traces of earlier versions.
    wide_bytes_per_second: a rank's to other replicas.
    """

    date: str
    version: str
    policy: str
    strategies: tuple[str, ...]
    costs: str  # in words; "" without costs
    fingerprint: str  # of the cost file
    memory_budget_bytes: int | None
    memory_margin: float
    stages: tuple[Stage, ...]
    ranks: dict[str, int]
    hardware: Hardware
    dtype: str
    model: dict[str, Any]
    place: tuple[int, int] | None = None
    wide_bytes_per_second: float = math.inf


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A microbatch that ran, or that ran out of memory; None: not known.

    documents: how many a packed row holds, None where it is not packed. load: what its costs depend
    on, where it was planned by cost.
    """

    iteration: int
    batch_size: int
    seq_length: int
    plan: str
    switched: bool
    planner_seconds: float
    predicted_seconds: float | None
    predicted_peak_bytes: int | None
    seconds: float | None
    peak_bytes: int | None
    documents: int | None = None
    load: Load | None = None

    @property
    def is_packed(self) -> bool:
        return self.documents is not None


@dataclass(frozen=True, slots=True)
class Iteration:
    """tokens and longest: of documents; None with sequences of fixed length."""

    iteration: int
    seconds: float
    tokens: int | None
    longest: int | None


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """memory_margin is that of the plans; peak_bytes of the microbatch what was alive."""

    microbatch: Microbatch
    memory_margin: float


@dataclass(frozen=True, slots=True)
class Corrected:
    """Factors on the costs, by strategy, in force from the next iteration on.

    hopes: by which plans multiply seconds besides; of strategies that are not here none.
    """

    iteration: int
    seconds_factors: dict[str, float]
    bytes_factors: dict[str, float]
    hopes: dict[str, float]


Record = Run | Microbatch | Iteration | OutOfMemory | Corrected


class UnknownKindError(ContentError):
    """A record of a kind that this version does not know."""


def parse_record(line: str) -> Record:
    """The record of a line; ContentError for whatever else it holds."""
    try:
        values = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ContentError("not JSON, or cut off") from error
    if not isinstance(values, dict):
        raise ContentError("not an object")
    kind = values.get("kind")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise UnknownKindError(f"unknown kind {kind!r:.40}")
    try:
        return reader(values)
    except KeyError as error:
        raise ContentError(f"{kind} lacks {error.args[0]!r:.40}") from error


@lru_cache(256)
def plan_of(text: str) -> Plan:
    """The plan of a record; ContentError where it is none."""
    try:
        return parse_runs(text)
    except UserError as error:
        raise ContentError(str(error)) from error


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _read_microbatch(values: dict[str, Any]) -> Microbatch:
    plan = check_text(values["plan"], "plan", max_length=MOST_PLAN_CHARACTERS)
    plan_of(plan)
    switched = values["switched"]
    if not isinstance(switched, bool):
        raise ContentError(f"switched must be true or false, got {switched!r:.40}")
    return Microbatch(
        check_integer(values["iteration"], "iteration", low=0, high=MAX_INTEGER),
        check_integer(values["batch_size"], "batch_size", low=1, high=MAX_BATCH_SIZE),
        check_integer(values["seq_length"], "seq_length", low=1, high=MAX_SEQ_LENGTH),
        plan,
        switched,
        _quantity(values["planner_microseconds"], "planner_microseconds") / 1e6,
        _optional(values, "predicted_seconds"),
        _optional_bytes(values, "predicted_peak_bytes"),
        _optional(values, "seconds"),
        _optional_bytes(values, "peak_bytes"),
        _optional_bytes(values, "documents"),
        None if values.get("load") is None else _read_load(values["load"]),
    )


def _read_load(value: Any, where: str = "load") -> Load:
    fields = dict(check_fields(Load, value, where, optional=("buffers",)))
    highest = {"seq_length": MAX_SEQ_LENGTH, "p": MOST_RANKS, "groups": MOST_RANKS}
    for name in ("documents", *highest):
        high = highest.get(name, MAX_INTEGER)
        check_integer(fields[name], f"{where}.{name}", low=1, high=high)
    if fields["within"] is not None and where != "load":
        raise ContentError(f"{where}.within must be null")
    if fields["within"] is not None:
        fields["within"] = _read_load(fields["within"], "load.within")
    if fields.get("buffers") is not None:
        buffers = check_fields(
            RowSizes, fields["buffers"], f"{where}.buffers", optional=LATER_BUFFER_KEYS
        )
        fields["buffers"] = RowSizes(**buffers)
    return Load(**fields)


def _read_iteration(values: dict[str, Any]) -> Iteration:
    return Iteration(
        check_integer(values["iteration"], "iteration", low=0, high=MAX_INTEGER),
        _quantity(values["seconds"], "seconds"),
        _optional_bytes(values, "tokens"),
        _optional_bytes(values, "longest_sequence_tokens"),
    )


def _read_out_of_memory(values: dict[str, Any]) -> OutOfMemory:
    margin = check_number(values["memory_margin"], "memory_margin", low=0, high=10)
    return OutOfMemory(_read_microbatch(values), margin)


def _read_corrected(values: dict[str, Any]) -> Corrected:
    return Corrected(
        check_integer(values["iteration"], "iteration", low=0, high=MAX_INTEGER),
        _factors(values, "seconds_factors"),
        _factors(values, "bytes_factors"),
        _factors(values, "hopes") if "hopes" in values else {},
    )


def _factors(values: dict[str, Any], name: str) -> dict[str, float]:
    factors = values[name]
    if not isinstance(factors, dict) or len(factors) > MOST_FACTORS:
        raise ContentError(f"{name} must be an object of strategies")
    return {
        check_text(strategy, "a strategy", max_length=100): check_number(
            factor, "a factor", low=0, high=1000
        )
        for strategy, factor in factors.items()
    }


def _read_run(values: dict[str, Any]) -> Run:
    texts = {name: check_text(values[name], name) for name in ("date", "version", "policy")}
    names = values["strategies"]
    names = [] if names is None else check_array(names, "strategies", max_items=100)
    ranks, model = values["ranks"], values["model"]
    if not isinstance(ranks, dict) or not isinstance(model, dict):
        raise ContentError("ranks and model must be objects")
    layout = {
        name: check_integer(ranks[name], f"ranks.{name}", low=1, high=1 << 30)
        for name in ("world", "tensor", "pipeline", "data")
    }
    shape = {name: model[name] for name in ("num_layers", "hidden_size")}
    for name, value in shape.items():
        check_integer(value, f"model.{name}", low=1, high=1 << 40)
    stages = check_array(values["stages"], "stages", max_items=MOST_STAGES)
    return Run(
        **texts,
        strategies=tuple(check_text(name, "a strategy", max_length=100) for name in names),
        costs=_costs(values["costs"]),
        fingerprint=_fingerprint(values["costs"]),
        memory_budget_bytes=_optional_bytes(values, "memory_budget_bytes"),
        memory_margin=check_number(values["memory_margin"], "memory_margin", low=0, high=10),
        stages=tuple(_read_stage(stage) for stage in stages),
        ranks=layout,
        hardware=Hardware(**check_fields(Hardware, values["hardware"], "hardware")),
        dtype=check_text(values["dtype"], "dtype", max_length=20),
        model=shape,
        place=_place(values),
        wide_bytes_per_second=_optional(values, "wide_bytes_per_second") or math.inf,
    )


def _place(values: dict[str, Any]) -> tuple[int, int] | None:
    place = values.get("place")
    if place is None:
        return None
    if not isinstance(place, dict):
        raise ContentError("place must be an object")
    data, pipeline = (
        check_integer(place[name], f"place.{name}", low=0, high=1 << 30)
        for name in ("data", "pipeline")
    )
    return data, pipeline


def _read_stage(value: Any) -> Stage:
    if isinstance(value, dict):  # earlier traces say nothing of these
        earlier = {"input_bytes_per_token": 0.0, "host_bytes": None, "angle_bytes_per_position": 0}
        earlier |= {"mlp_free_above": None, "num_predicting": 0, "held_besides": 0.0}
        earlier |= {"waiting_bytes": 0}
        value = {**earlier, **value}
    fields = dict(check_fields(Stage, value, "a stage"))
    highest = {"margin": 9, "input_bytes_per_token": MAX_INTEGER, "held_besides": MAX_LAYERS}
    for name, high in highest.items():
        fields[name] = check_number(fields[name], name, low=0, high=high)
    for name in ("buffer_free_above", "mlp_free_above", "host_bytes"):
        if fields[name] is not None:
            check_integer(fields[name], name, low=0, high=MAX_INTEGER)
    check_integer(fields["num_predicting"], "num_predicting", low=0, high=MAX_LAYERS)
    if not 1 <= fields["num_in_flight"] <= 1 << 20:
        raise ContentError(f"num_in_flight must be at least 1, got {fields['num_in_flight']}")
    return Stage(**fields)


def _costs(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, dict):
        raise ContentError("costs must be an object")
    source, hardware, date = (
        check_text(value[name], f"costs.{name}") for name in ("source", "hardware", "date")
    )
    return f"{source} on {hardware} ({date})"


def _fingerprint(costs: dict[str, Any] | None) -> str:
    return "" if costs is None else check_text(costs["fingerprint"], "costs.fingerprint")


def _quantity(value: Any, where: str) -> float:
    return check_number(value, where, low=0, high=MAX_QUANTITY)


def _optional(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return None if value is None else _quantity(value, name)


def _optional_bytes(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return None if value is None else check_integer(value, name, low=0, high=MAX_INTEGER)


_READERS: dict[str, Callable[[dict[str, Any]], Record]] = {
    "run": _read_run,
    "microbatch": _read_microbatch,
    "iteration": _read_iteration,
    "out_of_memory": _read_out_of_memory,
    "correction": _read_corrected,
}
