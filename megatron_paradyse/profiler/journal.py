"""The file of a profile: a cost file without a model, written anew after every point."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_paradyse.costs.cost_file import (
    holdings_warnings,
    read_cost_file,
    write_cost_file,
)
from megatron_paradyse.costs.description import Description, differences
from megatron_paradyse.costs.rows import RowMeasurement
from megatron_paradyse.costs.table import Constants, CostTable, Measurement
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import Load
from megatron_paradyse.profiler.points import Point
from megatron_paradyse.profiler.row_points import RowPoint

Key = tuple[str, str, int, int]  # strategy, operation, s, b
RowKey = tuple[str, Load]  # strategy, of its attention; without buffers


class Journal:
    """Measurements of one description, in the order in which they were taken."""

    def __init__(self, path: Path, description: Description):
        """Continues the file at path, if there is one of the same description.

        UserError with what differs otherwise.
        """
        self._path = path
        self.description = description
        self.constants: Constants | None = None
        self._measurements: dict[Key, Measurement] = {}
        self._rows: dict[RowKey, RowMeasurement] = {}
        if path.exists():
            self._continue()

    def _continue(self) -> None:
        table = read_cost_file(self._path).table
        found = differences(table.description, self.description)
        if found:
            raise UserError(
                f"{self._path} is a profile of something else ({'; '.join(found)}): give another "
                "--output, or remove the file"
            )
        self.description = table.description
        if table.measurements:
            # Where the file does not say for how many tokens its buffer was made, it is said before
            # longer ones follow.
            tokens = table.buffer_tokens
            self.constants = dataclasses.replace(table.constants, buffer_tokens=tokens)
        self._measurements = {_key(m): m for m in table.measurements}
        self._rows = {_row_key(m): m for m in table.rows}

    def __len__(self) -> int:
        return len(self._measurements) + len(self._rows)

    def warnings(self) -> list[str]:
        """Of a file that another version began: what is added is not alike, nor told apart."""
        return holdings_warnings(self._path, self.description)

    def complete(self, constants: Constants) -> None:
        """Take these where the file has none: it was begun by an earlier version, or just now."""
        known = self.constants or constants
        if known.host_bytes_per_second is None:
            rate = constants.host_bytes_per_second
            known = dataclasses.replace(known, host_bytes_per_second=rate)
        self.constants = known

    def found(self, point: Point | RowPoint) -> Measurement | RowMeasurement | None:
        """What is there of a point; of a row its load is told in full from now on."""
        if not isinstance(point, RowPoint):
            return self.get(point.key)
        measured = self._rows.get(_row_key(point))
        if measured is not None and measured.load != point.load:
            measured = dataclasses.replace(measured, load=point.load)
            self.record(measured)
        return measured

    def record(self, measurement: Measurement | RowMeasurement) -> None:
        if isinstance(measurement, RowMeasurement):
            self._rows[_row_key(measurement)] = measurement
        else:
            self.add(measurement)

    def get(self, key: Key) -> Measurement | None:
        return self._measurements.get(key)

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

    def save(self) -> None:
        """Write the whole file: a reader finds the old one or the new one, never a part."""
        assert self.constants is not None
        measured, rows = tuple(self._measurements.values()), tuple(self._rows.values())
        write_cost_file(self._path, CostTable(self.description, measured, self.constants, rows))


def _key(m: Measurement) -> Key:
    return m.strategy, m.operation, m.seq_length, m.batch_size


def _row_key(m: RowMeasurement | RowPoint) -> RowKey:
    """Of what every version tells of a load: the sizes of its buffers became more, day by day."""
    within = m.load.within and dataclasses.replace(m.load.within, buffers=None)
    return m.strategy, dataclasses.replace(m.load, buffers=None, within=within)
