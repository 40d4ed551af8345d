"""What every strategy's operations cost on one packed row: asked as a cost model is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_paradyse.costs.hybrid import HybridFit
from megatron_paradyse.costs.model import CostModel
from megatron_paradyse.costs.packed import (
    AS_LOCAL,
    LEAST_SHARE,
    LOCAL,
    NOTHING,
    one_document,
    share_of_scores,
    work_of,
)
from megatron_paradyse.costs.row_bytes import with_row_bytes
from megatron_paradyse.costs.table import ATTENTION, MODEL, OperationCosts
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import Load
from megatron_paradyse.strategies import RECOMPUTE, base_name, offloads, recomputes


@dataclass(frozen=True)
class RowTerms:
    """Seconds of a strategy's attention on the rows of s tokens, linear in what they hold.

    one: costs of one document; work: what that holds; forward, backward: seconds per unit of it.
    like: whose document it is.
    """

    strategy: str
    like: str
    one: OperationCosts
    work: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def seconds(self, load: Load) -> tuple[float, float]:
        """Forward and backward on a row."""
        more = [a - b for a, b in zip(work_of(self.strategy, load), self.work, strict=True)]
        forward = self.one.forward_seconds + _product(self.forward, more)
        backward = self.one.backward_seconds + _product(self.backward, more)
        return (
            max(forward, LEAST_SHARE * self.one.forward_seconds),
            max(backward, LEAST_SHARE * self.one.backward_seconds),
        )


def row_terms(model: CostModel, strategy: str, load: Load) -> RowTerms:
    """Those of attention, for all rows of the load's s and p; not of +offload.

    UserError where the strategy has no costs.
    """
    packed, s = model.packed, load.seq_length
    assert packed is not None and not offloads(strategy)
    work = one_document(strategy, load, causal=packed.causal)
    fit = packed.fits.get(base_name(strategy))
    if fit is not None:
        name = fit.like + (RECOMPUTE if recomputes(strategy) else "")
        backward = fit.backward
        if recomputes(strategy):
            backward = tuple(f + b for f, b in zip(fit.forward, fit.backward, strict=True))
        one = model.operation(name, ATTENTION, s)
        return RowTerms(strategy, name, one, work, fit.forward, backward)
    # What exchanges less than others takes no longer than the fastest of them.
    names = like(model, strategy, ATTENTION)
    name = min(names, key=lambda name: model.operation(name, ATTENTION, s).time_seconds)
    one = model.operation(name, ATTENTION, s)
    factors = []
    fits = model.fits_of(name, ATTENTION)
    for fitted, seconds in zip(fits, (one.forward_seconds, one.backward_seconds), strict=False):
        share = share_of_scores(fitted, s) if isinstance(fitted, HybridFit) else 0.0
        factors.append((share * seconds / work[0], *NOTHING[1:]))
    first = model.operation(names[0], ATTENTION, s)  # keeps what it does
    one = replace(first, forward_seconds=one.forward_seconds, backward_seconds=one.backward_seconds)
    return RowTerms(strategy, names[0], one, work, *factors)


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
        if operation != ATTENTION:
            return self._model.operation(like(self._model, strategy, operation)[0], operation, s)
        terms = row_terms(self._model, strategy, self._load)
        forward, backward = terms.seconds(self._load)
        one = replace(terms.one, forward_seconds=forward, backward_seconds=backward)
        packed, fits = self._model.packed, self._model.fits_of(terms.like, ATTENTION)
        assert packed is not None
        known = self._model.strategies(ATTENTION)
        suffix = strategy.removeprefix(base_name(strategy))
        names = [name + suffix for name in AS_LOCAL if name + suffix in known]
        least = self._model.operation(names[0], ATTENTION, s) if names else None
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


def _product(factors: tuple[float, ...], work: list[float]) -> float:
    return sum(factor * amount for factor, amount in zip(factors, work, strict=True))
