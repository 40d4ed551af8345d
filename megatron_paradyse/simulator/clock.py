"""When everything would be done, on a device that computes and communicates at the same time.

Three lines of time, as on a GPU: the host, which issues kernels and collectives one after another;
the device's kernels, each after the one before and not before it was issued; and its communication,
in the order in which it was issued, each after the kernels issued before it. A wait holds the
kernels, not the host, until a communication is done. Communication takes nothing from kernels here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Clock:
    """Seconds since the start, of each line."""

    host_seconds_per_kernel: float
    host_seconds_per_collective: float
    host: float = 0.0
    compute: float = 0.0
    communication: float = 0.0

    def kernel(self, seconds: float) -> None:
        self.host += self.host_seconds_per_kernel
        self.compute = max(self.compute, self.host) + seconds

    def begin(self, seconds: float, prepare: Callable[[], None] | None = None) -> float:
        """Start a communication of so many seconds; returns when it is done. Nothing is filled."""
        self.host += self.host_seconds_per_collective
        start = max(self.communication, self.compute, self.host)
        self.communication = start + seconds
        return self.communication

    def wait(self, done: float) -> None:
        self.compute = max(self.compute, done)

    def reading(self) -> float:
        """When an event recorded now among the kernels would happen."""
        return max(self.host, self.compute)

    def restart(self) -> None:
        """All lines at zero: nothing is under way."""
        self.host = self.compute = self.communication = 0.0

    @property
    def lines(self) -> tuple[float, float, float]:
        return self.host, self.compute, self.communication

    def since(self, lines: tuple[float, float, float]) -> tuple[float, float, float]:
        """What each line has gained since then."""
        return self.host - lines[0], self.compute - lines[1], self.communication - lines[2]

    def repeat(self, gains: tuple[float, float, float], times: int = 1) -> None:
        """So much happens again, so many times."""
        self.host += times * gains[0]
        self.compute += times * gains[1]
        self.communication += times * gains[2]
