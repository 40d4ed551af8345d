"""A table of costs: what was measured (or simulated) per strategy, operation, length and batch.

Legend: s sequence length in tokens, b sequences per microbatch, p ranks of the grid. All numbers
are of one rank, the slowest or largest of the grid.

The operations of a layer are "attention" and "mlp", each with its norm and residual, and
"layer", both together, as a check of their sum; where layers differ, layers.py says which are
whose. "embedding", "head" (final norm, output layer and loss) and, with multi-token prediction,
"prediction" (what a layer of it does besides: a final norm, the embedding of the next tokens, the
projection of both) belong to the pseudo-strategy "model".

What an operation costs, forward and backward:

    forward_seconds   backward_seconds
    kept_bytes        live after the forward less live before it; its output is included, because
                      the next operation keeps it as its input
    forward_bytes     peak during the forward less live after it
    backward_bytes    peak during the backward less live at its start without the incoming
                      gradient: gradients of output and input are included, and all workspace
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from megatron_paradyse.costs.description import Description
from megatron_paradyse.costs.layers import ATTENTION, LAYER, MLP, is_of_a_layer
from megatron_paradyse.errors import UserError
from megatron_paradyse.units import MAX_BATCH_SIZE, MAX_SEQ_LENGTH

if TYPE_CHECKING:
    from megatron_paradyse.costs.rows import RowMeasurement

LAYER_OPERATIONS = (ATTENTION, MLP, LAYER)
MODEL = "model"  # the pseudo-strategy of the parts that no strategy changes
EMBEDDING, PREDICTION, HEAD = "embedding", "prediction", "head"
MODEL_OPERATIONS = (EMBEDDING, PREDICTION, HEAD)

TIME_QUANTITIES = ("forward_seconds", "backward_seconds")
BYTE_QUANTITIES = ("kept_bytes", "forward_bytes", "backward_bytes")
QUANTITIES = TIME_QUANTITIES + BYTE_QUANTITIES

OK, BYTES_ONLY, OOM, UNSUPPORTED = "ok", "bytes only", "oom", "unsupported: "

MAX_NAME = 100  # characters of a strategy
MAX_STATUS = 500
MAX_QUANTITY = 1e18


@dataclass(frozen=True, slots=True)
class OperationCosts:
    """The five quantities of one operation, as measured or as predicted."""

    forward_seconds: float
    backward_seconds: float
    kept_bytes: float
    forward_bytes: float
    backward_bytes: float

    @property
    def time_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class Measurement:
    """One operation of one strategy at one (s, b); what was not measured is zero.

    status: "ok"; "bytes only", where seconds were not measured; "oom"; "unsupported: " and why.
    """

    strategy: str  # as plans write it: "ulysses_z", "metp+recompute"; or "model"
    operation: str
    seq_length: int
    batch_size: int
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
                f"measurement of {self.strategy!r:.60} {self.operation!r:.40} at "
                f"s={self.seq_length!r:.30}, b={self.batch_size!r:.30}: {fault}: measure it again"
            )

    def _fault(self) -> str | None:
        of_model = self.strategy == MODEL
        if not 0 < len(self.strategy) <= MAX_NAME or not self.strategy.isprintable():
            return f"a strategy's name has 1 to {MAX_NAME} printable characters"
        if of_model and self.operation not in MODEL_OPERATIONS:
            return f"operation must be one of {', '.join(MODEL_OPERATIONS)}"
        if not of_model and not is_of_a_layer(self.operation):
            return f"operation must be one of {', '.join(LAYER_OPERATIONS)}, or such as attention@4"
        if not 1 <= self.seq_length <= MAX_SEQ_LENGTH:
            return f"seq_length must lie in [1, {MAX_SEQ_LENGTH}]"
        if not 1 <= self.batch_size <= MAX_BATCH_SIZE:
            return f"batch_size must lie in [1, {MAX_BATCH_SIZE}]"
        known = self.status in (OK, BYTES_ONLY, OOM) or self.status.startswith(UNSUPPORTED)
        if not known or len(self.status) > MAX_STATUS:
            return (
                f'status must be "{OK}", "{BYTES_ONLY}", "{OOM}" or "{UNSUPPORTED}REASON", '
                f"got {self.status!r:.60}"
            )
        for name in QUANTITIES:
            value = getattr(self, name)
            if fault := fault_of(name, value):
                return fault
            if value and name not in measured_quantities(self.status):
                return f'{name} must be 0 where status is "{self.status:.60}", got {value!r:.40}'
        if self.status == OK and not self.forward_seconds > 0:
            return "forward_seconds must be above 0"
        return None

    @property
    def is_ok(self) -> bool:
        """Whether its bytes were measured."""
        return self.status in (OK, BYTES_ONLY)

    @property
    def is_timed(self) -> bool:
        return self.status == OK

    @property
    def time_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def costs(self) -> OperationCosts:
        return OperationCosts(*(getattr(self, name) for name in QUANTITIES))


def edges_of(description: Description) -> tuple[str, ...]:
    """The operations of "model" that it has."""
    return MODEL_OPERATIONS if description.mtp_num_layers else (EMBEDDING, HEAD)


def fault_of(name: str, value: float) -> str | None:
    """What is wrong with a quantity of that name: seconds, bytes, or bytes a second."""
    if math.isfinite(value) and 0 <= value <= MAX_QUANTITY:
        return None
    return f"{name} must lie in [0, {MAX_QUANTITY:g}], got {value!r:.40}"


def measured_quantities(status: str) -> tuple[str, ...]:
    """The quantities of a measurement with this status."""
    return {OK: QUANTITIES, BYTES_ONLY: BYTE_QUANTITIES}.get(status, ())


@dataclass(frozen=True)
class Constants:
    """What a microbatch does not change, of one rank.

    static_bytes: parameters, gradients and optimizer state; and what else stays or waits through
        an iteration: Megatron's gather buffer, and the gradient of tied embeddings.
    optimizer_seconds: an iteration without its microbatches: gradients made whole and zeroed, the
        step, the reduced loss.
    optimizer_bytes: the peak of that above static_bytes.
    host_bytes_per_second: of copies between the device and host memory, either way, while every
        rank copies; None where it is not known.
    buffer_tokens: s b of the microbatch for which that gather buffer was made; None where the file
        does not say: then the longest that was measured.
    waiting_bytes: of static_bytes, that gradient of tied embeddings, which the loss head's bytes
        have too; None where the file does not say.
    """

    static_bytes: float
    optimizer_seconds: float
    optimizer_bytes: float = 0.0
    host_bytes_per_second: float | None = None
    buffer_tokens: float | None = None
    waiting_bytes: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if fault := fault_of(field.name, value):
                raise UserError(f"constant {fault}")
        if self.host_bytes_per_second is not None and self.host_bytes_per_second < 1:
            raise UserError(
                "constant host_bytes_per_second must be at least 1, got "
                f"{self.host_bytes_per_second!r:.40}"
            )


@dataclass(frozen=True)
class CostTable:
    """What was measured, of what, on what; rows: of attention on packed rows."""

    description: Description
    measurements: tuple[Measurement, ...]
    constants: Constants
    rows: tuple[RowMeasurement, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "measurements", tuple(self.measurements))
        known = {*MODEL_OPERATIONS, *LAYER_OPERATIONS, *self.description.layer_kinds.measured()}
        object.__setattr__(self, "rows", tuple(self.rows))
        seen = set()
        for m in self.measurements:
            key = (m.strategy, m.operation, m.seq_length, m.batch_size)
            if key in seen:
                raise UserError(
                    f"{m.strategy} {m.operation} at s={m.seq_length}, b={m.batch_size} is in the "
                    "table twice: keep one"
                )
            if m.operation not in known:
                raise UserError(
                    f"{m.operation} of {m.strategy} at s={m.seq_length}, b={m.batch_size}: the "
                    "description tells of no such layer: measure it again"
                )
            seen.add(key)

    @property
    def buffer_tokens(self) -> float:
        """s b of the microbatch for which the gather buffer in static_bytes was made."""
        if self.constants.buffer_tokens is not None:
            return self.constants.buffer_tokens
        return max((m.seq_length * m.batch_size for m in self.measurements), default=0)

    def groups(self) -> Iterator[tuple[str, str, tuple[Measurement, ...]]]:
        """(strategy, operation, what was measured of it) in the table's order."""
        groups: dict[tuple[str, str], list[Measurement]] = {}
        for m in self.measurements:
            ok = groups.setdefault((m.strategy, m.operation), [])
            if m.is_ok:
                ok.append(m)
        for (strategy, operation), ok in groups.items():
            yield strategy, operation, tuple(ok)

    def lengths(self) -> tuple[int, ...]:
        """The lengths at which anything was measured, ascending."""
        return tuple(sorted({m.seq_length for m in self.measurements if m.is_ok}))

    def timed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lengths and the batch sizes at which anything was timed, ascending."""
        points = [m for m in self.measurements if m.is_timed]
        lengths, sizes = {m.seq_length for m in points}, {m.batch_size for m in points}
        return tuple(sorted(lengths)), tuple(sorted(sizes))

    def only(self, keep: Callable[[Measurement], bool]) -> CostTable:
        """The same table with the measurements for which keep(measurement) holds."""
        kept = tuple(m for m in self.measurements if keep(m))
        return CostTable(self.description, kept, self.constants, self.rows)
