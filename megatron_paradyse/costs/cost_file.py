"""The cost file: JSON with what was measured, of what, and the models fitted to it.

    schema_version   1; any other is refused
    description      see description.py
    constants        see table.py; without host_bytes_per_second, buffer_tokens or waiting_bytes
                     where not known
    measurements     see table.py; a measurement that is not "ok" has no quantities
    model            null, or {kind, laws, operations}: see fit_values.py
    rows             see rows.py; missing where no packed row was measured

Written all or nothing. Read as if an enemy had written it: nothing is executed, sizes are bounded,
and whatever is wrong ends as one line with the file, the key and the remedy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_paradyse.costs.description import (
    HALVES_KEY,
    HOLDINGS_KEY,
    OPTIONAL_KEYS,
    OTHER_LAYERS,
    WINDOW,
    Description,
    Hardware,
    ModelShape,
)
from megatron_paradyse.costs.fit_values import LAWS, read_laws, read_model, write_model
from megatron_paradyse.costs.layers import MAX_LAYERS
from megatron_paradyse.costs.model import CostModel
from megatron_paradyse.costs.rows import read_row, row_values
from megatron_paradyse.costs.strict import (
    ContentError,
    check_array,
    check_fields,
    check_integer,
    check_keys,
    check_number,
    check_object,
    check_text,
    load_json,
)
from megatron_paradyse.costs.table import (
    MAX_QUANTITY,
    Constants,
    CostTable,
    Measurement,
    measured_quantities,
)
from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies.sizes import HOLDINGS
from megatron_paradyse.units import MAX_BATCH_SIZE, MAX_SEQ_LENGTH
from megatron_paradyse.whole_file import check_replaced, write_whole

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 8 << 20
MAX_MEASUREMENTS = 20_000
MAX_VERSIONS = 50
MAX_OF_HALF = 50  # numbers that tell what one has
REMEDY = "make it again with megatron-paradyse profile, then fit"
KEYS = ("schema_version", "description", "constants", "measurements", "model")
POINT_KEYS = ("strategy", "operation", "seq_length", "batch_size", "status")


@dataclass(frozen=True)
class CostFile:
    """A cost file that was read.

    fingerprint: SHA-256 of its bytes, for ranks to compare; laws: by which its model was fitted.
    """

    path: str
    table: CostTable
    model: CostModel | None
    fingerprint: str
    laws: int = LAWS

    def require_model(self) -> CostModel:
        if self.model is None:
            raise UserError(
                f"{self.path} holds measurements but no fitted model: "
                f"run megatron-paradyse fit {self.path} -o {self.path}"
            )
        return self.model

    def warnings(self) -> list[str]:
        """Where another version measured, or fitted the model: that this one predicts otherwise."""
        told = holdings_warnings(self.path, self.table.description)
        if self.laws == LAWS:
            return told
        return [
            *told,
            f"another version of megatron_paradyse fitted {self.path}: this one predicts better "
            f"after megatron-paradyse fit {self.path} -o {self.path}",
        ]


def holdings_warnings(path: str | os.PathLike[str], of_file: Description) -> list[str]:
    """Where strategies hold other bytes than those of the version that made the file."""
    if of_file.holdings == HOLDINGS:
        return []
    again = "simulate" if of_file.source == "simulated" else "profile"
    return [
        f"the bytes in {path} are of strategies of another version of megatron_paradyse, which may "
        f"hold more or less than these: {again} again, into a new file"
    ]


def read_cost_file(path: str | os.PathLike[str]) -> CostFile:
    """Read and check a cost file; UserError, one line, for whatever is wrong with it."""
    path = os.fspath(path)
    values, content = load_json(path, max_bytes=MAX_FILE_BYTES, remedy=REMEDY)
    try:
        if isinstance(values, dict) and "schema_version" in values:
            _check_version(values["schema_version"])
        has_rows = isinstance(values, dict) and "rows" in values
        check_keys(values, "the file", (*KEYS, "rows") if has_rows else KEYS)
        table = _read_table(values)
        model = None if values["model"] is None else read_model(values["model"], table)
        laws = LAWS if values["model"] is None else read_laws(values["model"])
    except (ContentError, UserError) as error:
        raise UserError(f"{path}: {error}: {REMEDY}") from error
    return CostFile(path, table, model, hashlib.sha256(content).hexdigest(), laws)


def check_cost_output(path: str | os.PathLike[str]) -> None:
    """UserError where a cost file cannot be written, or would replace a file of another kind."""
    check_replaced(path, "a cost file", ('"description"', '"attention_kernel"'))


def write_cost_file(
    path: str | os.PathLike[str], table: CostTable, model: CostModel | None = None
) -> None:
    """Write a cost file, whole or not at all: never one that would not be read again."""
    path = os.fspath(path)
    text = _to_json(table, model)
    if len(text) > MAX_FILE_BYTES or _size(table) > MAX_MEASUREMENTS:
        raise UserError(
            f"{path}: {_size(table)} measurements are more than a cost file holds "
            f"({MAX_MEASUREMENTS}, {MAX_FILE_BYTES >> 20} MiB): profile fewer lengths or strategies"
        )
    if model is not None:
        _check_model(path, text, table)
    write_whole(path, text)


def _check_model(path: str, text: str, table: CostTable) -> None:
    """A model may be of more steps or operations than is read."""
    try:
        read_model(json.loads(text)["model"], table)
    except ContentError as error:
        raise UserError(
            f"{path}: not written, a cost file does not hold so much: {error}: profile fewer "
            "lengths, batch sizes or strategies"
        ) from error


def _size(table: CostTable) -> int:
    return max(len(table.measurements), len(table.rows))


def _to_json(table: CostTable, model: CostModel | None) -> str:
    """JSON with a line for each measurement and each fitted operation."""

    def lines(items: list[dict[str, Any]]) -> str:
        return "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in items) + "\n]"

    points = []
    for m in table.measurements:
        names = (*POINT_KEYS, *measured_quantities(m.status))
        points.append({name: _short(getattr(m, name)) for name in names})
    rows = [{key: _short(value) for key, value in row_values(m).items()} for m in table.rows]
    rows_text = f'"rows": {lines(rows)},\n' if rows else ""
    model_text = "null"
    if model is not None:
        values = write_model(model)
        model_text = f'{{"kind": "{values["kind"]}", "laws": {values["laws"]}, '
        model_text += f'"operations": {lines(values["operations"])}'
        packed = values.get("packed")
        model_text += f', "packed": {lines(packed)}}}' if packed else "}"
    return (
        f'{{"schema_version": {SCHEMA_VERSION},\n'
        f'"description": {json.dumps(_known(_plain(table.description)), indent=1)},\n'
        f'"constants": {json.dumps(_known(_plain(table.constants)))},\n'
        f'"measurements": {lines(points)},\n{rows_text}"model": {model_text}}}\n'
    )


def _plain(value: Any) -> dict[str, Any]:
    values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    for name, inner in values.items():
        if dataclasses.is_dataclass(inner):
            values[name] = _plain(inner)
        elif isinstance(inner, Mapping):
            values[name] = dict(inner)
    return values


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if value is not None and not (name == OTHER_LAYERS and not value)
    }


def _short(value: Any) -> Any:
    """Whole numbers without a fraction: bytes."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_version(version: Any) -> None:
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ContentError(f"schema_version must be {SCHEMA_VERSION}, got {version!r:.40}")


def _read_table(values: dict[str, Any]) -> CostTable:
    constants = _read_constants(values["constants"])
    points = check_array(values["measurements"], "measurements", max_items=MAX_MEASUREMENTS)
    rows = check_array(values.get("rows", []), "rows", max_items=MAX_MEASUREMENTS)
    description = _read_description(values["description"])
    return CostTable(
        description,
        tuple(_read_measurement(point, f"measurements[{i}]") for i, point in enumerate(points)),
        Constants(**constants),
        tuple(read_row(row, f"rows[{i}]", description) for i, row in enumerate(rows)),
    )


def _read_constants(value: Any) -> dict[str, float]:
    """Keys that need not be known may be missing, as they are in older files."""
    keys = [
        f.name
        for f in dataclasses.fields(Constants)
        if f.default is not None or (isinstance(value, dict) and f.name in value)
    ]
    constants = check_keys(value, "constants", tuple(keys))
    for key, number in constants.items():
        check_number(number, f"constants.{key}", low=0, high=MAX_QUANTITY)
    return constants


def _read_description(value: Any) -> Description:
    optional = (*OPTIONAL_KEYS, HOLDINGS_KEY, OTHER_LAYERS)
    values = dict(check_fields(Description, value, "description", optional=optional))
    values.setdefault(HOLDINGS_KEY, None)
    values["model"] = ModelShape(**check_fields(ModelShape, values["model"], "description.model"))
    values["hardware"] = Hardware(
        **check_fields(Hardware, values["hardware"], "description.hardware")
    )
    versions = check_object(values["versions"], "description.versions", max_items=MAX_VERSIONS)
    for key, version in versions.items():
        check_text(key, "a key of description.versions")
        check_text(version, f"description.versions.{key}")
    values[OTHER_LAYERS] = _read_layers(values.get(OTHER_LAYERS, {}))
    if HALVES_KEY in values:
        values[HALVES_KEY] = _read_halves(values[HALVES_KEY])
    return Description(**values)


def _read_halves(value: Any) -> dict[str, dict[str, int]]:
    where = f"description.{HALVES_KEY}"
    halves = check_object(value, where, max_items=MAX_LAYERS)
    return {
        name: {
            key: check_integer(
                number,
                f"{where}.{name:.40}.{key:.40}",
                low=int(key == WINDOW),
                high=MAX_SEQ_LENGTH,
            )
            for key, number in check_object(
                has, f"{where}.{name:.40}", max_items=MAX_OF_HALF
            ).items()
        }
        for name, has in halves.items()
    }


def _read_layers(value: Any) -> dict[str, tuple[int, ...]]:
    where = f"description.{OTHER_LAYERS}"
    return {
        name: tuple(
            check_integer(number, f"{where}.{name:.40}", low=1, high=MAX_LAYERS)
            for number in check_array(numbers, f"{where}.{name:.40}", max_items=MAX_LAYERS)
        )
        for name, numbers in check_object(value, where, max_items=MAX_LAYERS).items()
    }


def _read_measurement(value: Any, where: str) -> Measurement:
    status = value.get("status") if isinstance(value, dict) else None
    quantities = measured_quantities(status) if isinstance(status, str) else ()
    check_keys(value, where, POINT_KEYS + quantities)
    for key in ("strategy", "operation", "status"):
        check_text(value[key], f"{where}.{key}")
    check_integer(value["seq_length"], f"{where}.seq_length", low=1, high=MAX_SEQ_LENGTH)
    check_integer(value["batch_size"], f"{where}.batch_size", low=1, high=MAX_BATCH_SIZE)
    for key in quantities:
        check_number(value[key], f"{where}.{key}", low=0, high=MAX_QUANTITY)
    return Measurement(**value)
