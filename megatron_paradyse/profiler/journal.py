"""The file of a profile: what has been measured so far, written anew after every point."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from megatron_paradyse.costs.description import Description, Hardware, ModelShape, differences
from megatron_paradyse.costs.table import Constants, CostTable, Measurement
from megatron_paradyse.errors import UserError

FORMAT = "megatron_paradyse profile"
SCHEMA = 1

Key = tuple[str, str, int, int]  # strategy, operation, s, b


class Journal:
    """Measurements of one description, in the order in which they were taken."""

    def __init__(self, path: Path, description: Description, settings: dict[str, Any]):
        """Continues the file at path, if there is one of the same description and settings.

        settings: what else the numbers depend on, such as the flags. UserError with what differs.
        """
        self._path = path
        self._settings = settings
        self.description = description
        self.constants: Constants | None = None
        self._measurements: dict[Key, Measurement] = {}
        if path.exists():
            self._continue()

    def _continue(self) -> None:
        table, settings = read(self._path)
        found = differences(table.description, self.description)
        found += [
            f"{name}: {settings.get(name)} in the file, {value} now"
            for name, value in self._settings.items()
            if settings.get(name) != value
        ]
        if found:
            raise UserError(
                f"{self._path} is a profile of something else ({'; '.join(found)}): give another "
                "--output, or remove the file"
            )
        self.description, self.constants = table.description, table.constants
        self._measurements = {_key(m): m for m in table.measurements}

    def __contains__(self, key: Key) -> bool:
        return key in self._measurements

    def of(self, strategy: str, operation: str, batch_size: int) -> list[Measurement]:
        """What is there of one operation at any length."""
        wanted = (strategy, operation, batch_size)
        return [
            m
            for m in self._measurements.values()
            if (m.strategy, m.operation, m.batch_size) == wanted
        ]

    def add(self, measurement: Measurement) -> None:
        self._measurements[_key(measurement)] = measurement

    def table(self) -> CostTable:
        assert self.constants is not None
        return CostTable(self.description, tuple(self._measurements.values()), self.constants)

    def save(self) -> None:
        """Write the whole file, so that a reader finds the old one or the new one, never a part."""
        write(self._path, self.table(), self._settings)


def _key(m: Measurement) -> Key:
    return m.strategy, m.operation, m.seq_length, m.batch_size


def write(path: Path, table: CostTable, settings: dict[str, Any]) -> None:
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "description": dataclasses.asdict(table.description),
        "settings": settings,
        "constants": dataclasses.asdict(table.constants),
        "measurements": [dataclasses.asdict(m) for m in table.measurements],
    }
    partial = path.with_name(path.name + ".part")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read(path: Path) -> tuple[CostTable, dict[str, Any]]:
    """The table of a profile and its settings; UserError for any other file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT or document["schema"] != SCHEMA:
            raise ValueError(
                f"format {document['format']!r:.40}, schema {document['schema']!r:.20}"
            )
        described = dict(document["description"])
        described["model"] = ModelShape(**described["model"])
        described["hardware"] = Hardware(**described["hardware"])
        table = CostTable(
            Description(**described),
            tuple(Measurement(**m) for m in document["measurements"]),
            Constants(**document["constants"]),
        )
        return table, dict(document["settings"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"{path} is not a profile of this version ({why:.100}): give another --output"
        ) from error
