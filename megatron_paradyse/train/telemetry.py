"""What the microbatches of training were planned to cost, and what they did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_paradyse.hook import Planned
from megatron_paradyse.live_bytes import Meter
from megatron_paradyse.moments import moment, seconds_between


@dataclass(eq=False)
class Microbatch:
    """One microbatch at one transformer block.

    switched: its plan differs from the one before it. marks: the beginning and the end of the
    block's forward, and of its backward. peak_bytes: everything alive on this rank, at most; None
    where it cannot be told: other microbatches are in flight, or a CPU without a budget.
    """

    planned: Planned
    switched: bool
    marks: list[Any] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def seconds(self) -> float | None:
        """Of the layers, forward and backward; None unless both have run.

        With what multi-token prediction does beside its layers.
        """
        if len(self.marks) < 4:
            return None
        start, end, again, done = self.marks[:4]
        return seconds_between(start, end) + seconds_between(again, done)


class Telemetry:
    """Observes every transformer block of this rank; see hook.Observer."""

    def __init__(self, meter: Meter | None = None):
        """meter: read and reset at each microbatch; None with several of them in flight."""
        self.meter = meter
        self._microbatches: list[Microbatch] = []
        self._last_plans: dict[tuple[int, ...], str] = {}

    def begins(self, planned: Planned, hidden: Tensor) -> None:
        layers, runs = tuple(planned.plan.layers), planned.plan.runs()
        switched = self._last_plans.get(layers, runs) != runs
        self._last_plans[layers] = runs
        microbatch = Microbatch(planned, switched)
        self._microbatches.append(microbatch)
        if self.meter is not None:
            self.meter.reset_peak()
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self._backward_ends(microbatch))
        microbatch.marks.append(moment())

    def forward_ends(self, output: Tensor) -> None:
        microbatch = self._microbatches[-1]
        microbatch.marks.append(moment())
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda grad: microbatch.marks.append(moment()))

    def _backward_ends(self, microbatch: Microbatch) -> None:
        microbatch.marks.append(moment())
        if self.meter is not None:
            microbatch.peak_bytes = self.meter.peak_bytes

    @property
    def current(self) -> Microbatch | None:
        """The one that began last, since take()."""
        return self._microbatches[-1] if self._microbatches else None

    def live_peak_bytes(self) -> int | None:
        """The peak since the current microbatch began."""
        return None if self.meter is None else self.meter.peak_bytes

    def take(self) -> list[Microbatch]:
        """The microbatches since the last call, in the order of their forwards."""
        taken, self._microbatches = self._microbatches, []
        return taken
