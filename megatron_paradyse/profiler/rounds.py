"""Times the points of one length again, in turn: what slows a machine meets all of them alike."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

AGAIN = 2  # rounds after the first
SHORT_SECONDS = 0.05  # of a point: in longer ones noise evens out


class Rounds:
    """Collects the points of a length while they are measured; then again() times them anew.

    A plan is chosen by differences between strategies. Measured one after the other, each once,
    strategies of like speed come out in the order of what else the machine did meanwhile.
    """

    def __init__(self, seconds_of: Callable[[Any], tuple[float, float]]):
        """seconds_of: forward and backward of a measured point; alike on all ranks."""
        self._seconds_of = seconds_of
        self._measured: list[tuple[Any, Any]] = []
        self._at: tuple[int, int] | None = None

    def begins(self, point) -> bool:
        """Whether the point is of another length than those collected."""
        return self._at not in (None, (point.seq_length, point.batch_size))

    def add(self, point, measurement) -> None:
        """A point that was timed just now, with its measurement."""
        self._at = point.seq_length, point.batch_size
        if measurement.is_ok and measurement.time_seconds < SHORT_SECONDS:
            self._measured.append((point, measurement))

    def again(self) -> list[Any]:
        """The measurements with the medians of all rounds; forgets the points."""
        found = [[(m.forward_seconds, m.backward_seconds)] for _, m in self._measured]
        for _ in range(AGAIN):
            for (point, _), seconds in zip(self._measured, found, strict=True):
                seconds.append(self._seconds_of(point))
        measurements = []
        for (_, measurement), seconds in zip(self._measured, found, strict=True):
            forward, backward = (statistics.median(column) for column in zip(*seconds, strict=True))
            measurements.append(
                dataclasses.replace(measurement, forward_seconds=forward, backward_seconds=backward)
            )
        self._measured, self._at = [], None
        return measurements
