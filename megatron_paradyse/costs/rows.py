"""What was measured of attention on packed rows: part of a cost table, and of its file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_paradyse.costs.description import Description
from megatron_paradyse.costs.strict import (
    ContentError,
    check_integer,
    check_keys,
    check_number,
    check_text,
)
from megatron_paradyse.costs.table import (
    MAX_NAME,
    MAX_QUANTITY,
    MAX_STATUS,
    OK,
    OOM,
    QUANTITIES,
    UNSUPPORTED,
    fault_of,
)
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import Load
from megatron_paradyse.strategies.row_sizes import RowSizes
from megatron_paradyse.strategies.sizes import DOCUMENT_ROWS
from megatron_paradyse.units import MAX_SEQ_LENGTH

KEYS = ("strategy", "load", "status")
WITHIN = "within"  # a window, where a model has one: those of a load that are fewer then
WITHIN_KEYS = ("scores", "fullest_scores", "keys_received", "peers")
BUFFERS = "buffers"  # of a load; files of earlier versions do not tell them
BUFFER_KEYS = tuple(field.name for field in dataclasses.fields(RowSizes))
LATER_BUFFER_KEYS = BUFFER_KEYS[7:]  # which files of earlier versions lack too
MOST_ROWS = 2 + DOCUMENT_ROWS  # of a call, to a token
PADDED = "padded"  # the one that is no number
OF_WIDE = ("groups", "group_keys")  # none is measured
LOAD_KEYS = tuple(
    field.name
    for field in dataclasses.fields(Load)
    if field.name not in (WITHIN, BUFFERS, *OF_WIDE)
)


@dataclass(frozen=True, slots=True)
class RowMeasurement:
    """Attention of one strategy, without suffix, on one row; what was not measured is zero.

    The quantities are those of table.py; status: "ok", "oom", "unsupported: " and why.
    """

    strategy: str
    load: Load
    status: str = OK
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    kept_bytes: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise UserError(
                f"measurement of {self.strategy!r:.60} on a row of s={self.load.seq_length}, "
                f"{self.load.documents} documents: {fault}: measure it again"
            )

    def _fault(self) -> str | None:
        if self.status not in (OK, OOM) and not self.status.startswith(UNSUPPORTED):
            return f"status is none of {OK}, {OOM}, {UNSUPPORTED}REASON: {self.status!r:.60}"
        for name in QUANTITIES:
            if fault := fault_of(name, getattr(self, name)):
                return fault
        if self.is_ok and not self.forward_seconds > 0:
            return "forward_seconds must be above 0"
        return None

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def time_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


def row_values(m: RowMeasurement) -> dict[str, Any]:
    """As values for JSON."""
    load = {name: getattr(m.load, name) for name in LOAD_KEYS}
    if m.load.buffers is not None:
        load[BUFFERS] = dataclasses.asdict(m.load.buffers)
    if m.load.within is not None:
        load[WITHIN] = {name: getattr(m.load.within, name) for name in WITHIN_KEYS}
        if m.load.within.buffers is not None:
            load[WITHIN][BUFFERS] = dataclasses.asdict(m.load.within.buffers)
    values: dict[str, Any] = {"strategy": m.strategy, "load": load, "status": m.status}
    return values | {name: getattr(m, name) for name in (QUANTITIES if m.is_ok else ())}


def read_row(value: Any, where: str, d: Description) -> RowMeasurement:
    """The measurement of these values, in a file of that; ContentError for anything wrong."""
    ok = isinstance(value, dict) and value.get("status") == OK
    quantities = QUANTITIES if ok else ()
    values = dict(check_keys(value, where, KEYS + quantities))
    check_text(values["strategy"], f"{where}.strategy", max_length=MAX_NAME)
    check_text(values["status"], f"{where}.status", max_length=MAX_STATUS)
    for name in quantities:
        check_number(values[name], f"{where}.{name}", low=0, high=MAX_QUANTITY)
    values["load"] = _read_load(values["load"], f"{where}.load", d)
    return RowMeasurement(**values)


def _read_load(value: Any, where: str, d: Description) -> Load:
    if d.windows and isinstance(value, dict) and WITHIN not in value:
        raise ContentError(
            f"{where} lacks {WITHIN!r}, what the attention window leaves of a row, as in files of "
            "earlier versions: profile --packed again, into a new file"
        )
    keys = LOAD_KEYS + ((WITHIN,) if d.windows else ())
    values = dict(check_keys(value, where, keys, optional=(BUFFERS,)))
    within, buffers = values.pop(WITHIN, None), values.pop(BUFFERS, None)
    s = check_integer(values["seq_length"], f"{where}.seq_length", low=1, high=MAX_SEQ_LENGTH)
    check_integer(values["p"], f"{where}.p", low=1, high=s)
    pairs, tokens = ("scores", "fullest_scores"), ("documents", "fullest_documents")
    for name in pairs:
        check_integer(values[name], f"{where}.{name}", low=1, high=s * s)
    for name in tokens:
        check_integer(values[name], f"{where}.{name}", low=1, high=s)
    check_integer(values["keys_received"], f"{where}.keys_received", low=0, high=s)
    check_integer(values["peers"], f"{where}.peers", low=0, high=values["p"] - 1)
    if not isinstance(values["in_order"], bool):
        raise ContentError(f"{where}.in_order must be true or false")
    if values["p"] != d.p:
        raise ContentError(f"{where}.p must be that of the description, {d.p}, got {values['p']}")
    if buffers is not None:
        values[BUFFERS] = _read_buffers(buffers, f"{where}.{BUFFERS}", s)
    load = Load(**values)
    if not d.windows:
        return load
    return dataclasses.replace(load, within=_read_within(within, f"{where}.{WITHIN}", load))


def _read_buffers(value: Any, where: str, seq_length: int) -> RowSizes:
    must = BUFFER_KEYS[: -len(LATER_BUFFER_KEYS)]
    values = dict(check_keys(value, where, must, optional=LATER_BUFFER_KEYS))
    padded = values.pop(PADDED, True)
    if not isinstance(padded, bool):
        raise ContentError(f"{where}.{PADDED} must be true or false")
    for name in values:
        check_integer(values[name], f"{where}.{name}", low=0, high=MOST_ROWS * seq_length)
    return RowSizes(**values, padded=padded)


def _read_within(value: Any, where: str, load: Load) -> Load:
    values = dict(check_keys(value, where, WITHIN_KEYS, optional=(BUFFERS,)))
    buffers = values.pop(BUFFERS, None)
    for name in WITHIN_KEYS:
        low, high = int(name in WITHIN_KEYS[:2]), getattr(load, name)
        check_integer(values[name], f"{where}.{name}", low=low, high=high)
    if buffers is not None:
        values[BUFFERS] = _read_buffers(buffers, f"{where}.{BUFFERS}", load.seq_length)
    return dataclasses.replace(load, **values)
