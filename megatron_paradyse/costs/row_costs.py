"""What every strategy's operations cost on one packed row: asked as a cost model is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_paradyse.costs.hybrid import HybridFit
from megatron_paradyse.costs.layers import half_of
from megatron_paradyse.costs.model import CostModel
from megatron_paradyse.costs.packed import (
    AS_LOCAL,
    LOCAL,
    Work,
    least_share,
    share_of_scores,
    work_of,
)
from megatron_paradyse.costs.row_bounds import with_row_bytes
from megatron_paradyse.costs.row_bytes import joined, walked_row_bytes
from megatron_paradyse.costs.row_law import NOTHING, RowLaw
from megatron_paradyse.costs.table import ATTENTION, MODEL, TIME_QUANTITIES, OperationCosts
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import Load
from megatron_paradyse.strategies import RECOMPUTE, base_name, offloads, recomputes


@dataclass(frozen=True)
class Counted:
    """A law, whether it counts what a window leaves, and what one document of s tokens holds.

    least: of that document's seconds, what no row takes less than.
    """

    law: RowLaw
    windowed: bool
    of_one: Work
    least: float

    def seconds(self, one: float, seq_length: int, work: Work) -> float:
        """On a row of that work; one: of one document."""
        return max(one + self.law.excess(one, seq_length, work, self.of_one), self.least * one)


@dataclass(frozen=True)
class RowTerms:
    """Seconds of a strategy's attention on the rows of s tokens.

    one: costs of one document; like: whose document it is. forward, backward: of the strategy
    without suffix, and alone: what its one document takes. crossing: of a load, forward and
    backward, what comes from other groups.
    """

    strategy: str
    like: str
    one: OperationCosts
    forward: Counted
    backward: Counted
    alone: OperationCosts
    crossing: Callable[[Load], tuple[float, float]]

    def seconds(self, load: Load) -> tuple[float, float]:
        """Forward and backward on a row.

        Of +recompute in proportion to those without: it does the same, the forward twice. What
        crosses groups is hidden behind computing, or hides that: whichever takes longer.
        """
        alone = (self.alone.forward_seconds, self.alone.backward_seconds)
        work = again = work_of(self.strategy, load.seen(self.forward.windowed))
        if self.backward.windowed != self.forward.windowed:
            again = work_of(self.strategy, load.seen(self.backward.windowed))
        forward = self.forward.seconds(alone[0], load.seq_length, work)
        backward = self.backward.seconds(alone[1], load.seq_length, again)
        as_measured = self.one is self.alone
        if load.groups > 1:
            first, then = self.crossing(load)
            if as_measured and recomputes(self.strategy):  # whose backward runs the forward again
                then += first
            forward, backward = max(forward, first), max(backward, then)
        if as_measured:
            return forward, backward
        return (
            self.one.forward_seconds * _ratio(forward, alone[0]),
            self.one.backward_seconds * _ratio(forward + backward, sum(alone)),
        )


def _ratio(seconds: float, of: float) -> float:
    return seconds / of if of > 0 else 1.0


def row_terms(model: CostModel, strategy: str, load: Load, operation: str) -> RowTerms:
    """Those of attention, for all rows of the load's s and p; not of +offload.

    Rows were measured of the first layer's attention: that of layers that differ, like that of
    strategies of which none were measured, follows from its single documents. UserError where the
    strategy has no costs.
    """
    packed, s = model.packed, load.seq_length
    assert packed is not None and not offloads(strategy)
    fit = packed.fits.get(base_name(strategy)) if operation == ATTENTION else None

    def crossing(load: Load) -> tuple[float, float]:
        return packed.crossing_seconds(strategy, load.seen(operation in packed.windows))

    if fit is not None:
        one = alone = model.operation(fit.like, ATTENTION, s)
        name = fit.like
        if recomputes(strategy):
            name += RECOMPUTE
            one = model.operation(name, ATTENTION, s)
        counts = _of_one(model, strategy, fit.like, operation, load)
        forward, backward = Counted(fit.forward, *counts[0]), Counted(fit.backward, *counts[1])
        return RowTerms(strategy, name, one, forward, backward, alone, crossing)
    # What exchanges less than others takes no longer than the fastest of them.
    names = like(model, strategy, operation)
    name = min(names, key=lambda name: model.operation(name, operation, s).time_seconds)
    one = model.operation(name, operation, s)
    fits, counts = model.fits_of(name, operation), _of_one(model, strategy, name, operation, load)
    times = (one.forward_seconds, one.backward_seconds)
    forward, backward = (
        Counted(_derived(fit, s, seconds, of_one), windowed, of_one, least)
        for fit, seconds, (windowed, of_one, least) in zip(fits, times, counts, strict=False)
    )
    first = model.operation(names[0], operation, s)  # keeps what it does
    one = replace(first, forward_seconds=one.forward_seconds, backward_seconds=one.backward_seconds)
    return RowTerms(strategy, names[0], one, forward, backward, one, crossing)


def _derived(fit: object, seq_length: int, seconds: float, of_one: Work) -> RowLaw:
    """Scores take what the law of one document gives to pairs of tokens."""
    share = share_of_scores(fit, seq_length) if isinstance(fit, HybridFit) else 0.0
    return RowLaw((share * seconds / of_one[0], *NOTHING[1:]))


def _of_one(
    model: CostModel, strategy: str, name: str, operation: str, load: Load
) -> tuple[tuple[bool, Work, float], ...]:
    """Forward and backward: whether the window counts, as for name, one document's work, and the
    least share of its seconds.
    """
    packed = model.packed
    assert packed is not None
    one = packed.load_of_one(load.seq_length, load.p)
    found = []
    for fit in model.fits_of(name, operation)[: len(TIME_QUANTITIES)]:
        windowed = packed.counts_window(strategy, operation, fit)
        work = work_of(strategy, one.seen(windowed))
        found.append((windowed, work, least_share(fit, load.seq_length)))
    return tuple(found)


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
        packed = self._model.packed
        assert packed is not None
        window, tiled_window = packed.windows.get(operation), packed.tiled_window(operation)
        windowed = window is not None
        load = self._load
        if packed.joined:
            load = joined(strategy, load, windowed=windowed)
        if packed.is_walked(strategy, operation):
            found = walked_row_bytes(
                strategy,
                terms.like,
                one,
                packed.sizes,
                load.seen(windowed),
                in_one_call=packed.joined,
                window=window,
            )
            if found is not None:
                return found
        known = self._model.strategies(operation)
        suffix = strategy.removeprefix(base_name(strategy))
        names = [name + suffix for name in AS_LOCAL if name + suffix in known]
        least = self._model.operation(names[0], operation, s) if names else None
        return with_row_bytes(
            strategy,
            one,
            packed.sizes,
            load.seen(windowed),
            packed.load_of_one(s, self._load.p).seen(windowed),
            least=least,
            tiled_window=tiled_window,
            in_one_call=packed.joined,
            windowed=windowed,
            drops=packed.dropout,
            like=terms.like,
        )


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
