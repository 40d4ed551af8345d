"""Where a policy's numbers come from: costs of microbatches and rows, memory of a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_paradyse.costs.layers import Operations
from megatron_paradyse.packing.load import Load
from megatron_paradyse.packing.row import Row

# (seconds, kept_bytes, forward_bytes, backward_bytes), or None where it cannot run this shape
Numbers = Sequence[float]
# of operation ("attention", "mlp@2"), strategy, s, b
Costs = Callable[[str, str, int, int], Numbers | None]
# of attention strategy, MLP strategy, s, b and the layer's operations: for pairs whose costs are
# not the sum of the two
PairCosts = Callable[[str, str, int, int, Operations], Numbers | None]
Pair = tuple[str, str]


def _nothing(seq_length: int, batch_size: int) -> int:
    return 0


def _no_peak(seq_length: int, batch_size: int, *, backward: bool) -> int:
    return 0


def _never(operation: str, strategy: str, seq_length: int, batch_size: int) -> bool:
    return False


class PeakBytes(Protocol):
    """Of (s, b), with a backward or of a forward alone."""

    def __call__(self, s: int, b: int, /, *, backward: bool) -> int: ...


@dataclass(frozen=True)
class StageMemory:
    """The memory of one pipeline stage, besides its layers.

    embedding and head give (s, b) -> bytes: what the embedding, or a received input, and buffers of
    this size keep, and the peaks of the two.
    gather_bytes: of the buffer that is there besides if the plan has a choice for which
    gathers(half, strategy, s, b) is true.
    host_bytes: what +offload may take of host memory, None without limit; input_bytes: of a layer's
    input, which it keeps there. angle_bytes_per_position: of RoPE's table, of which embedding_kept
    has those of s positions: a wide row has more.
    """

    budget_bytes: int
    static_bytes: int = 0
    embedding_kept: Callable[[int, int], int] = _nothing
    embedding_peak: PeakBytes = _no_peak
    head_peak: PeakBytes = _no_peak
    gather_bytes: Callable[[int, int], int] = _nothing
    gathers: Callable[[str, str, int, int], bool] = _never
    input_bytes: Callable[[int, int], int] = _nothing
    host_bytes: int | None = None
    num_in_flight: int = 1
    margin: float = 0.0
    angle_bytes_per_position: int = 0

    def more_angles(self, seq_length: int, load: Load | None) -> int:
        """Bytes of angles beyond those of s positions that embedding_kept has.

        A wide row's table is of all groups' positions; where there are several documents, each of
        the row's positions has angles of its own besides.
        """
        if load is None:
            return 0
        tables = load.groups - 1 + (load.groups if load.documents > 1 else 0)
        return tables * seq_length * self.angle_bytes_per_position

    def layers_on_host(self, seq_length: int, batch_size: int) -> int | None:
        """Of how many layers the inputs fit there, with every microbatch in flight; None: all."""
        each = self.input_bytes(seq_length, batch_size) * self.num_in_flight
        return None if self.host_bytes is None or each == 0 else self.host_bytes // each


@dataclass(frozen=True)
class CostSource:
    """Where the numbers come from. evaluation gives those of forwards without gradient.

    same_pair gives, of an attention's and an MLP's strategy, the names of a pair that runs and
    costs the same: where that is offered, plans name it alone. tries: whether planners consider a
    pair; without it all.

    Without it an evaluation is planned by bounds: the training's seconds, and all that its forward
    ever holds as forward_bytes.
    """

    training: Costs
    pairs: PairCosts | None = None
    evaluation: Costs | None = None
    same_pair: Callable[[str, str], Pair] | None = None
    tries: Callable[[str, str], bool] | None = None

    def same_pairs(self, offered: set[Pair]) -> dict[Pair, Pair]:
        """Of pairs that run what another pair runs that is offered too: that pair."""
        if self.same_pair is None:
            return {}
        same = {pair: self.same_pair(*pair) for pair in offered}
        return {pair: other for pair, other in same.items() if other != pair and other in offered}


@dataclass(frozen=True)
class RowSource:
    """Where the numbers of packed rows come from.

    load: what a row's costs depend on, rounded so that like rows share it; its s is what the row is
    planned as. costs: of the rows of a load. takes: whether a strategy can run a half, "attention"
    or "mlp", of the rows of a load, or without one of a microbatch of single documents.
    """

    load: Callable[[Row], Load]
    costs: Callable[[Load], CostSource]
    takes: Callable[[str, str, Load | None], bool]
