"""The fitted cost model: what any strategy's operation costs at any (s, b)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_paradyse.costs.embedding_copy import EmbeddingCopy
from megatron_paradyse.costs.evaluation import FORWARD, HybridEvaluation, PaperEvaluation
from megatron_paradyse.costs.hybrid import HybridFit
from megatron_paradyse.costs.offloaded import HostLink, offloaded
from megatron_paradyse.costs.packed import Packed
from megatron_paradyse.costs.paper import PaperFit
from megatron_paradyse.costs.table import (
    EMBEDDING,
    MAX_BATCH_SIZE,
    MAX_SEQ_LENGTH,
    MODEL,
    PREDICTION,
    QUANTITIES,
    TIME_QUANTITIES,
    Constants,
    Measurement,
    OperationCosts,
)
from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies import RECOMPUTE, base_name, names_of_costs, offloads

HYBRID, PAPER = "hybrid", "paper"
MODELS = (HYBRID, PAPER)
MAX_PREPARED = 64  # batch sizes


@dataclass(frozen=True)
class OperationFit:
    """The fits of one operation of one strategy, one per quantity, and the lengths they saw.

    min_length, max_length: of bytes. timed: b, the shortest and the longest length with seconds.
    """

    strategy: str
    operation: str
    min_length: int
    max_length: int
    fits: tuple[HybridFit, ...] | tuple[PaperFit, ...]  # in the order of QUANTITIES
    timed: tuple[tuple[int, int, int], ...]

    def longest_seen(self, quantity: str) -> int:
        """The longest length at any b to which the fit of a quantity was made."""
        if quantity not in TIME_QUANTITIES:
            return self.max_length
        return max(longest for _, _, longest in self.timed)


def timed_ranges(points: Iterable[Measurement]) -> tuple[tuple[int, int, int], ...]:
    """b and the shortest and longest length that was timed at it, by ascending b."""
    lengths: dict[int, list[int]] = {}
    for m in points:
        if m.is_timed:
            lengths.setdefault(m.batch_size, []).append(m.seq_length)
    return tuple((b, min(found), max(found)) for b, found in sorted(lengths.items()))


class CostModel:
    """Predicts costs from fits; the same inputs give the same numbers on every rank.

    kind: "hybrid" or "paper". constants: the table's. host: the table's way to host memory, for
    the costs of +offload; None: not known. packed: how packed rows follow; None: they do not. copy:
    of an embedding's several sequences, for costs of one; None: not known.
    """

    def __init__(
        self,
        kind: str,
        fits: Sequence[OperationFit],
        constants: Constants,
        host: HostLink | None = None,
        packed: Packed | None = None,
        copy: EmbeddingCopy | None = None,
    ) -> None:
        assert kind in MODELS and len({(f.strategy, f.operation) for f in fits}) == len(fits)
        self.kind = kind
        self.fits = tuple(fits)
        self.constants = constants
        self.host = host
        self.packed = packed
        self._copy = copy
        self._rows = {(fit.strategy, fit.operation): i for i, fit in enumerate(self.fits)}
        self._copied = [] if copy is None else self._of_one_sequence(EMBEDDING, PREDICTION)
        self._prepared: dict[int, HybridEvaluation | PaperEvaluation] = {}
        self._last: tuple[tuple[int, int], list[list[float]]] = ((0, 0), [])

    def strategies(self, operation: str) -> tuple[str, ...]:
        """The strategies of which this operation was fitted; +offload follows from +recompute."""
        return tuple(fit.strategy for fit in self.fits if fit.operation == operation)

    def has(self, strategy: str, operation: str) -> bool:
        """Whether it has all costs that plans of this name need."""
        needed = {(name, operation) for name in names_of_costs(strategy)}
        return needed <= self._rows.keys() and (self.host is not None or not offloads(strategy))

    def profiled_range(self, strategy: str, operation: str) -> tuple[int, int]:
        """The shortest and the longest length that the fit saw."""
        fit = self.fits[self._row(strategy, operation)]
        return fit.min_length, fit.max_length

    def timed_range(self, strategy: str, operation: str, batch_size: int) -> tuple[int, int] | None:
        """The shortest and the longest length that was timed at b; None where none was."""
        timed = self.fits[self._row(strategy, operation)].timed
        return next(((low, high) for b, low, high in timed if b == batch_size), None)

    def with_rows(self, packed: Packed) -> CostModel:
        """The same of single documents, and this of packed rows."""
        return CostModel(self.kind, self.fits, self.constants, self.host, packed, self._copy)

    def fits_of(
        self, strategy: str, operation: str
    ) -> tuple[HybridFit, ...] | tuple[PaperFit, ...]:
        """The fits of its quantities, in the order of QUANTITIES."""
        return self.fits[self._row(strategy, operation)].fits

    def operation(
        self, strategy: str, operation: str, seq_length: int, batch_size: int = 1
    ) -> OperationCosts:
        """Costs of one operation of one layer at (s, b).

        The first call at an (s, b) computes every strategy and operation, the next look it up.
        Raises UserError when the model has no such strategy or operation.
        """
        if offloads(strategy) and (strategy, operation) not in self._rows:
            again = base_name(strategy) + RECOMPUTE
            return self.offloaded(self.operation(again, operation, seq_length, batch_size))
        row = self._row(strategy, operation)
        key, values = self._last
        if key != (seq_length, batch_size):
            values = self._evaluate(seq_length, batch_size)
            self._last = ((seq_length, batch_size), values)
        return OperationCosts(*values[row])

    def offloaded(self, recomputed: OperationCosts) -> OperationCosts:
        """Of +offload, from those of +recompute; UserError where the host's rate is not known."""
        if self.host is None:
            raise UserError(
                "no costs of +offload: the file has no rate of copies to host memory: profile "
                "again, or leave +offload out"
            )
        return offloaded(recomputed, self.host)

    def predict(
        self, strategy: str, operation: str, quantity: str, seq_length: int, batch_size: int = 1
    ) -> float:
        """One quantity at (s, b): one of QUANTITIES, or "time_seconds"."""
        if quantity not in (*QUANTITIES, "time_seconds"):
            raise UserError(
                f"quantity is one of {', '.join(QUANTITIES)}, time_seconds, got {quantity!r:.40}"
            )
        return getattr(self.operation(strategy, operation, seq_length, batch_size), quantity)

    def all_operations(
        self, seq_length: int, batch_size: int = 1
    ) -> dict[tuple[str, str], OperationCosts]:
        """Costs of every (strategy, operation) at (s, b)."""
        values = self._evaluate(seq_length, batch_size)
        return {key: OperationCosts(*row) for key, row in zip(self._rows, values, strict=True)}

    def _row(self, strategy: str, operation: str) -> int:
        try:
            return self._rows[strategy, operation]
        except KeyError:
            known = ", ".join(self.strategies(operation)) or "nothing"
            raise UserError(
                f"no costs of the {operation} of {strategy!r:.60}: the file has those of {known}: "
                "profile it, or leave it out of the strategies"
            ) from None

    def _evaluate(self, seq_length: int, batch_size: int) -> list[list[float]]:
        evaluation = self._prepared.get(batch_size)
        if evaluation is None:
            evaluation = self._prepare(batch_size)
        if not 1 <= seq_length <= MAX_SEQ_LENGTH:
            raise UserError(f"seq_length must lie in [1, {MAX_SEQ_LENGTH}], got {seq_length!r:.40}")
        values = evaluation(seq_length).tolist()
        for row in self._copied:  # of a prediction at most: it may peak elsewhere
            assert self._copy is not None
            values[row][FORWARD] += self._copy(seq_length, batch_size)
        return values

    def _of_one_sequence(self, *operations: str) -> list[int]:
        """The rows of these operations of the model of which no b but 1 was measured."""
        rows = [self._rows[MODEL, name] for name in operations if (MODEL, name) in self._rows]
        return [row for row in rows if all(b == 1 for b, _, _ in self.fits[row].timed)]

    def _prepare(self, batch_size: int) -> HybridEvaluation | PaperEvaluation:
        if not 1 <= batch_size <= MAX_BATCH_SIZE:
            raise UserError(f"batch_size must lie in [1, {MAX_BATCH_SIZE}], got {batch_size!r:.40}")
        kind: type[HybridEvaluation] | type[PaperEvaluation]
        kind = HybridEvaluation if self.kind == HYBRID else PaperEvaluation
        fits = [one for fit in self.fits for one in fit.fits]
        lengths = [fit.longest_seen(quantity) for fit in self.fits for quantity in QUANTITIES]
        evaluation = kind(fits, lengths, batch_size)  # type: ignore[arg-type]
        if len(self._prepared) >= MAX_PREPARED:
            self._prepared.pop(next(iter(self._prepared)))
        self._prepared[batch_size] = evaluation
        return evaluation
