"""What every strategy's operations cost on one packed row: asked as a cost model is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_paradyse.costs.hybrid import HybridFit
from megatron_paradyse.costs.layers import half_of
from megatron_paradyse.costs.model import CostModel
from megatron_paradyse.costs.packed import (
    AS_LOCAL,
    LEAST_SHARE,
    LOCAL,
    one_document,
    share_of_scores,
    work_of,
)
from megatron_paradyse.costs.row_bytes import with_row_bytes
from megatron_paradyse.costs.row_law import NOTHING, RowLaw
from megatron_paradyse.costs.table import ATTENTION, MODEL, OperationCosts
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import Load
from megatron_paradyse.strategies import RECOMPUTE, base_name, offloads, recomputes


@dataclass(frozen=True)
class RowTerms:
    """Seconds of a strategy's attention on the rows of s tokens.

    one: costs of one document; work: what that holds; like: whose document it is. forward,
    backward: laws of the strategy without suffix, and alone: what its one document takes.
    """

    strategy: str
    like: str
    one: OperationCosts
    work: tuple[float, ...]
    forward: RowLaw
    backward: RowLaw
    alone: OperationCosts

    def seconds(self, load: Load) -> tuple[float, float]:
        """Forward and backward on a row.

        Of +recompute in proportion to those without: it does the same, the forward twice.
        """
        work = work_of(self.strategy, load)
        alone = (self.alone.forward_seconds, self.alone.backward_seconds)
        forward, backward = (
            max(one + law.excess(one, load.seq_length, work, self.work), LEAST_SHARE * one)
            for law, one in zip((self.forward, self.backward), alone, strict=True)
        )
        if self.one is self.alone:
            return forward, backward
        return (
            self.one.forward_seconds * _ratio(forward, alone[0]),
            self.one.backward_seconds * _ratio(forward + backward, sum(alone)),
        )


def _ratio(seconds: float, of: float) -> float:
    return seconds / of if of > 0 else 1.0


def row_terms(model: CostModel, strategy: str, load: Load, operation: str = ATTENTION) -> RowTerms:
    """Those of attention, for all rows of the load's s and p; not of +offload.

    Rows were measured of the first layer's attention: that of layers that differ, like that of
    strategies of which none were measured, follows from its single documents. UserError where the
    strategy has no costs.
    """
    packed, s = model.packed, load.seq_length
    assert packed is not None and not offloads(strategy)
    work = one_document(strategy, load, causal=packed.causal)
    fit = packed.fits.get(base_name(strategy)) if operation == ATTENTION else None
    if fit is not None:
        one = alone = model.operation(fit.like, ATTENTION, s)
        name = fit.like
        if recomputes(strategy):
            name += RECOMPUTE
            one = model.operation(name, ATTENTION, s)
        return RowTerms(strategy, name, one, work, fit.forward, fit.backward, alone)
    # What exchanges less than others takes no longer than the fastest of them.
    names = like(model, strategy, operation)
    name = min(names, key=lambda name: model.operation(name, operation, s).time_seconds)
    one = model.operation(name, operation, s)
    laws = []
    fits = model.fits_of(name, operation)
    for fitted, seconds in zip(fits, (one.forward_seconds, one.backward_seconds), strict=False):
        share = share_of_scores(fitted, s) if isinstance(fitted, HybridFit) else 0.0
        laws.append(RowLaw((share * seconds / work[0], *NOTHING[1:])))
    first = model.operation(names[0], operation, s)  # keeps what it does
    one = replace(first, forward_seconds=one.forward_seconds, backward_seconds=one.backward_seconds)
    return RowTerms(strategy, names[0], one, work, laws[0], laws[1], one)


class RowCosts:
    """Callable as CostModel.operation, for the (s, b) of the rows of a load: (s, 1).

    Only attention differs from a document of s tokens. A strategy without costs raises UserError.
    """

    def __init__(self, model: CostModel, load: Load):
        self._model, self._load = model, load
        self._found: dict[tuple[str, str], OperationCosts] = {}

    def __call__(
        self, strategy: str, operation: str, seq_length: int, batch_size: int = 1
    ) -> OperationCosts:
        assert (seq_length, batch_size) == (self._load.seq_length, 1), "costs are of this row"
        key = (strategy, operation)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._costs(strategy, operation)
        return found

    def _costs(self, strategy: str, operation: str) -> OperationCosts:
        s = self._load.seq_length
        if strategy == MODEL:
            return self._model.operation(strategy, operation, s)
        if offloads(strategy):
            return self._model.offloaded(self(base_name(strategy) + RECOMPUTE, operation, s))
        if half_of(operation) != ATTENTION:
            return self._model.operation(like(self._model, strategy, operation)[0], operation, s)
        terms = row_terms(self._model, strategy, self._load, operation)
        forward, backward = terms.seconds(self._load)
        one = replace(terms.one, forward_seconds=forward, backward_seconds=backward)
        packed, fits = self._model.packed, self._model.fits_of(terms.like, operation)
        assert packed is not None
        known = self._model.strategies(operation)
        suffix = strategy.removeprefix(base_name(strategy))
        names = [name + suffix for name in AS_LOCAL if name + suffix in known]
        least = self._model.operation(names[0], operation, s) if names else None
        return with_row_bytes(strategy, one, fits, packed.sizes, self._load, least=least)


def like(model: CostModel, strategy: str, operation: str) -> tuple[str, ...]:
    """The strategies whose fits tell of this one; UserError if there is none.

    Itself; for local_z those that gather weights as it does.
    """
    known = model.strategies(operation)
    if strategy in known or base_name(strategy) != LOCAL:
        return (strategy,)
    suffix = strategy.removeprefix(LOCAL)
    found = tuple(name + suffix for name in AS_LOCAL if name + suffix in known)
    if not found:
        raise UserError(
            f"no costs of the {operation} of {strategy}: the file has none of "
            f"{', '.join(AS_LOCAL)}{f' with {suffix}' if suffix else ''} to tell them from: "
            "profile one of them"
        )
    return found
