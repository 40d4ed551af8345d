"""The trace: a JSON line per microbatch and per iteration, written by rank 0 of each grid.

kind             "run", "microbatch", "iteration", "correction" or "out_of_memory"
run              at each start: what run_record.py gives
iteration        from 1, as Megatron counts
microbatch       batch_size, seq_length (padded), plan (runs of like layers), switched,
                 planner_microseconds, predicted_seconds and predicted_peak_bytes (null where
                 the policy does not choose by cost), seconds (the layers', forward and
                 backward), peak_bytes (null where it cannot be told); of a packed row documents
                 and tokens (without padding), and replicas, if several share it: seq_length is then
                 that of each, all else of the row; and if planned by cost its load, as it was
                 planned for (packing/load.py)
iteration        seconds, losses (last pipeline stage; null for NaN and infinity, which JSON
                 lacks), and for documents tokens, shortest_sequence_tokens and
                 longest_sequence_tokens;
                 seconds and exit_code alone of one after which Megatron's check of results ends
                 the job, without a step
correction       seconds_factors and bytes_factors by strategy, in force from the next iteration on;
                 hopes, while strategies are tried: what plans multiply their seconds by besides
out_of_memory    a microbatch that did not fit, with what was alive and the safety margin
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from megatron.core import mpu

from megatron_paradyse.errors import UserError
from megatron_paradyse.hook import Planned
from megatron_paradyse.train.telemetry import Microbatch
from megatron_paradyse.whole_file import append_whole

BEGIN = b'{"kind": '  # of every line


class Trace:
    """Appends to FILE; with several grids (replicas, pipeline stages) each has a file of its own:
    FILE's name with -dp1-pp0 before its suffix.
    """

    def __init__(self, path: str):
        self._path = Path(path)
        self._grid: Path | None = None
        self._pipe: int | None = None  # held open: where none writes its reader is at the end

    @property
    def path(self) -> Path:
        """This grid's file; process groups must exist."""
        if self._grid is None:
            replicas = mpu.get_data_parallel_world_size()
            stages = mpu.get_pipeline_model_parallel_world_size()
            name = self._path.name
            if replicas * stages > 1:
                place = (
                    f"-dp{mpu.get_data_parallel_rank()}-pp{mpu.get_pipeline_model_parallel_rank()}"
                )
                name = f"{self._path.stem}{place}{self._path.suffix}"
            self._grid = self._path.with_name(name)
        return self._grid

    def start(self, run: dict[str, Any]) -> None:
        """Write what a training that starts is, on rank 0 of the grid."""
        if mpu.get_tensor_model_parallel_rank() == 0:
            self._check()
            self._end_last_line()
            self._write([{"kind": "run", **run}])

    def iteration(
        self, iteration: int, microbatches: list[Microbatch], values: dict[str, Any]
    ) -> None:
        """Write an iteration's microbatches, then the iteration, on rank 0 of the grid."""
        if mpu.get_tensor_model_parallel_rank() == 0:
            records = [as_record(microbatch) for microbatch in microbatches]
            told = {n: value if math.isfinite(value) else None for n, value in values.items()}
            self._write([*records, {"kind": "iteration", "iteration": iteration, **told}])

    def correction(self, iteration: int, factors: dict[str, Any]) -> None:
        """Write factors that are in force after this iteration, on rank 0 of the grid."""
        if mpu.get_tensor_model_parallel_rank() == 0:
            self._write([{"kind": "correction", "iteration": iteration, **factors}])

    def out_of_memory(self, record: dict[str, Any]) -> bool:
        """Write what did not fit; whether it is there now. Any rank may."""
        try:
            self._write([record])
        except UserError:
            return False  # what ran out of memory is told all the same
        return True

    def _check(self) -> None:
        """UserError for a file that is no trace, which lines at its end would spoil, and for a
        pipe that nobody reads, which would never open.
        """
        try:
            if self.path.is_fifo():
                self._pipe = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            begin = b""
            if self.path.is_file():
                with self.path.open("rb") as file:
                    begin = file.read(len(BEGIN))
        except OSError as error:
            raise self._cannot(error) from error
        if not BEGIN.startswith(begin):  # of a start that was killed there may be less
            raise UserError(
                f"--paradyse-trace {self.path} is another file, not a trace: give the name of a "
                "new file, or of a trace to go on with"
            )

    def _cannot(self, error: OSError) -> UserError:
        return UserError(
            f"--paradyse-trace {self.path}: {error.strerror}: give a file that can be written"
        )

    def _end_last_line(self) -> None:
        """A start that was killed while it wrote may have left a part of a line."""
        if not self.path.is_file():
            return
        with self.path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
                file.write(b"\n")

    def _write(self, records: list[dict]) -> None:
        text = "".join(json.dumps(record) + "\n" for record in records)
        try:
            append_whole(self.path, text.encode())
        except OSError as error:
            raise self._cannot(error) from error


def out_of_memory_record(
    microbatch: Microbatch,
    circumstances: dict[str, Any],
    *,
    alive: int | None,
    peak_by_file: int | None,
) -> dict[str, Any]:
    """The line of a microbatch that did not fit. circumstances: see memory_record.py."""
    more = {"kind": "out_of_memory", "uncorrected_peak_bytes": peak_by_file, "peak_bytes": alive}
    return as_record(microbatch) | circumstances | more


def as_record(microbatch: Microbatch) -> dict[str, Any]:
    """The line of a microbatch."""
    planned, seconds = microbatch.planned, microbatch.seconds
    return {
        "kind": "microbatch",
        "iteration": planned.iteration + 1,
        "microbatch": planned.microbatch,
        "batch_size": planned.batch_size,
        "seq_length": planned.seq_length,
        **_of_row(planned),
        "plan": planned.plan.runs(),
        "switched": microbatch.switched,
        "planner_microseconds": round(planned.planner_seconds * 1e6, 1),
        "predicted_seconds": planned.seconds,
        "predicted_peak_bytes": planned.peak_bytes,
        "seconds": None if seconds is None else round(seconds, 6),
        "peak_bytes": microbatch.peak_bytes,
    }


def _of_row(planned: Planned) -> dict[str, Any]:
    row, rows = planned.row, getattr(planned.policy, "rows", None)  # costs of rows, if by cost
    if row is None:
        return {}
    record: dict[str, Any] = {"documents": len(row.lengths), "tokens": row.num_tokens}
    if row.groups > 1:
        record["replicas"] = row.groups
    if rows is not None:
        record["load"] = dataclasses.asdict(rows.load(row))
    return record
