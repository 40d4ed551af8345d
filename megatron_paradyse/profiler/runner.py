"""Measures points, one after another, and says what became of each."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from pathlib import Path

from megatron_paradyse.costs.packed import AS_LOCAL
from megatron_paradyse.costs.rows import RowMeasurement
from megatron_paradyse.costs.table import BYTES_ONLY, MODEL, OK, OOM, Measurement
from megatron_paradyse.errors import UserError
from megatron_paradyse.live_bytes import Meter
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.profiler.agree import (
    RESTART_CODE,
    Agreement,
    OneRankFailedError,
    leave_note,
    status_alone,
    status_of,
)
from megatron_paradyse.profiler.iterations import forget_gradients
from megatron_paradyse.profiler.journal import Journal
from megatron_paradyse.profiler.lengths import expected_bytes
from megatron_paradyse.profiler.measure import (
    measure_bytes,
    measure_seconds,
    seconds_of_runs,
    warm_up,
)
from megatron_paradyse.profiler.model import ProfiledModel
from megatron_paradyse.profiler.operations import Operation, Operations, tensor_parallel_size
from megatron_paradyse.profiler.points import Options, Point
from megatron_paradyse.profiler.row_points import RowPoint
from megatron_paradyse.shapes import attention_shape
from megatron_paradyse.strategies import PACKED_ONLY, check_takes, get_strategy
from megatron_paradyse.strategies.contract import Microbatch
from megatron_paradyse.train import watchdog
from megatron_paradyse.train.ending import is_lost_peer

# The meter's own time, below 0.1 ms per kernel, and its copies for collectives then hardly count.
LONG_ENOUGH_SECONDS = 4.0
RUNS_AGAIN = 2
SECONDS_TO_LOOK = 3.0  # for a rank whose process has ended, after a connection was closed


def empty_measurement(point: Point | RowPoint, status: str) -> Measurement | RowMeasurement:
    """Of a point of which nothing was measured."""
    if isinstance(point, RowPoint):
        return RowMeasurement(point.strategy, point.load, status)
    return Measurement(*point.key, status=status)


class Runner:
    """Measures points, one after another, and says what became of each."""

    def __init__(
        self,
        model: ProfiledModel,
        meter: Meter,
        journal: Journal,
        agreement: Agreement,
        options: Options,
    ):
        self._model, self._meter = model, meter
        self._journal, self._agreement, self._options = journal, agreement, options
        self._operations: Operations | None = None
        self._at: tuple[int, int] | None = None
        hardware = journal.description.hardware
        self._budget_bytes = options.memory_bytes or hardware.memory_bytes

    def run(self, point: Point | RowPoint) -> Measurement | RowMeasurement:
        """The point's measurement, alike on every rank."""
        empty = empty_measurement(point, OOM)
        measured = empty
        try:
            status = self._agreement.status(self._foreseen(point))
            if status == OK:
                failed = False
                try:
                    measured = self._measured(point)
                    status = OK if measured.is_ok else measured.status
                except Exception as error:
                    if is_lost_peer(error):  # a rank that was killed says nothing of the point
                        end_if_one_is_missing(error)
                    status, failed = status_of(error), True
                    error.__traceback__ = None  # its frames hold tensors
                status = self._agreement.status(status)
                if failed:
                    self._forget()
        except OneRankFailedError as error:
            cause = error.__cause__
            if cause is not None and is_lost_peer(cause):  # between a point's end and its agreement
                end_if_one_is_missing(cause)
            leave_note(Path(self._options.output), point.key, status_alone(error))
            dog = watchdog.current()
            if dog is not None:
                dog.failed("ranks failed apart at a point of the profile")
            sys.stderr.write(f"ranks failed apart at {point.key}: {error}\n")
            sys.stderr.flush()
            os._exit(RESTART_CODE)
        if status == OK:
            return measured
        return dataclasses.replace(empty, status=status)

    def _foreseen(self, point: Point | RowPoint) -> str:
        """What can be known before it runs: a shape that cannot, a length that would not fit."""
        if point.strategy != MODEL:
            shape = attention_shape(
                self._model.layer_of(point.operation).self_attention, training=True
            )
            row, p = getattr(point, "row", None), tensor_parallel_size()
            sizes = Microbatch(point.seq_length, point.batch_size)
            try:
                get_strategy(point.strategy).check(shape, p)
                check_takes(point.strategy, microbatch_of(row) if row else sizes, p)
            except UserError as error:
                return status_of(error)
        like = AS_LOCAL[0] if point.strategy in PACKED_ONLY else point.strategy
        others = self._journal.of(like, point.operation, point.batch_size)
        if any(m.status == OOM and m.seq_length < point.seq_length for m in others):
            return OOM
        expected = expected_bytes(others, point.seq_length)
        if expected is not None and self._meter.live_bytes + expected > self._budget_bytes:
            return OOM
        return OK

    def _measured(self, point: Point | RowPoint) -> Measurement | RowMeasurement:
        empty = empty_measurement(point, OOM)
        operation = self._operation(point)
        warm_up(operation)
        found, found_seconds = measure_bytes(operation, self._meter)
        peak = found.kept_bytes + max(found.forward_bytes, found.backward_bytes)
        if self._meter.live_bytes + peak > self._budget_bytes:  # a CPU only emulates its budget
            return empty
        if not point.is_timed:
            return dataclasses.replace(empty, status=BYTES_ONLY, **dataclasses.asdict(found))
        forward, backward = found_seconds
        if forward + backward < LONG_ENOUGH_SECONDS:
            forward, backward = measure_seconds(
                operation, bound_seconds=self._options.seconds_per_point
            )
        return dataclasses.replace(
            empty,
            status=OK,
            forward_seconds=forward,
            backward_seconds=backward,
            **dataclasses.asdict(found),
        )

    def seconds_again(self, point: Point | RowPoint) -> tuple[float, float]:
        """Forward and backward of a point that run() has measured, in few runs."""
        return seconds_of_runs(self._operation(point), RUNS_AGAIN)

    def _operation(self, point: Point | RowPoint) -> Operation:
        at = (point.seq_length, point.batch_size)
        if self._operations is None or self._at != at:
            self._forget()
            with self._meter:
                self._operations = Operations(self._model, *at)
            self._at = at
        row = point.row if isinstance(point, RowPoint) else None
        with self._meter:  # which must know the angles of a row that all layers share
            return self._operations.get(point.operation, point.strategy, row)

    def _forget(self) -> None:
        """Drop the tensors of a length, and what a failure may have left in gradients."""
        self._operations = self._at = None
        gc.collect()
        forget_gradients(self._model)


def end_if_one_is_missing(error: BaseException) -> None:
    """Where a collective failed because a rank has gone, say so and end; else return."""
    dog = watchdog.current()
    if dog is not None:
        dog.lost_a_peer(error.__traceback__, seconds=SECONDS_TO_LOOK)
