"""The clock of real kernels beside communication that a network's model stands for.

Kernels are timed between the moments at which communication begins or is waited for; afterwards all
of it is laid on two lines of time, as clock.py does: kernels, and communication in its order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from megatron_paradyse.moments import moment, seconds_between


class MeasuredClock:
    """Moments of one device; read after the last of them."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Any, Any, float]] = []  # what, before, after, a number

    def restart(self) -> None:
        self._steps.clear()
        self.mark()

    def mark(self) -> None:
        """A moment that laps() tells of."""
        now = moment()
        self._steps.append(("mark", now, now, 0.0))

    def begin(self, seconds: float, prepare: Callable[[], None] | None = None) -> int:
        """Start a communication of so many seconds; what prepare() takes counts nowhere."""
        before = after = moment()
        if prepare is not None:
            prepare()
            after = moment()
        self._steps.append(("begin", before, after, seconds))
        return len(self._steps) - 1

    def wait(self, begun: int) -> None:
        now = moment()
        self._steps.append(("wait", now, now, begun))

    def laps(self) -> list[float]:
        """Seconds from each mark to the next, communication included."""
        compute = communication = 0.0
        done: dict[int, float] = {}
        marks: list[float] = []
        last = self._steps[0][1]
        for index, (what, before, after, number) in enumerate(self._steps):
            compute += seconds_between(last, before)
            last = after
            if what == "begin":
                communication = max(communication, compute) + number
                done[index] = communication
            elif what == "wait":
                compute = max(compute, done[int(number)])
            else:
                marks.append(compute)
        return [end - start for start, end in itertools.pairwise(marks)]
