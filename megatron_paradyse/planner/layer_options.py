"""What the halves of a layer may run for one microbatch, in the planner's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_paradyse.costs.layers import ATTENTION, Operations, half_of
from megatron_paradyse.errors import UserError
from megatron_paradyse.planner.problem import Choice, LayerOptions
from megatron_paradyse.planner.sources import CostSource, Numbers, StageMemory


class OptionsMaker:
    """Of layers whose halves have the costs of some operations, and may run some strategies.

    countable: bytes of a choice from which on it is left out, if there are others: sums of such
    bytes would not be exact, and no memory has them (score rows grow with s squared). takes: of a
    strategy and half, whether it can run this microbatch; None: all can.
    """

    def __init__(
        self,
        costs: CostSource,
        memory: StageMemory,
        *,
        batch_size: int,
        seq_length: int,
        forward_only: bool,
        countable: int,
        takes: Callable[[str, str], bool] | None,
    ):
        self._costs, self._memory = costs, memory
        self._s, self._b, self._forward_only = seq_length, batch_size, forward_only
        self._countable, self._takes = countable, takes

    def __call__(
        self, operations: Operations, allowed: tuple[tuple[str, ...], tuple[str, ...]]
    ) -> LayerOptions:
        """allowed: the strategies of attention and of the MLP. UserError where none can run."""
        first, second = (self._half(*half) for half in zip(operations, allowed, strict=True))
        source = self._costs.pairs
        if self._forward_only or source is None:
            return LayerOptions(first, second)
        offered = [(one.name, other.name) for one in first for other in second]
        pairs, same = {}, self._costs.same_pairs(set(offered))
        for one in first:
            for other in second:
                if (one.name, other.name) in same:
                    continue
                numbers = source(one.name, other.name, self._s, self._b, operations)
                if numbers is not None:
                    gathers = one.gathers or other.gathers
                    pairs[one.name, other.name] = _choice(one.name, numbers, gathers)
        tries = self._costs.tries
        untried = [pair for pair in offered if tries is not None and not tries(*pair)]
        return LayerOptions(first, second, pairs, same, frozenset(untried))

    def _half(self, operation: str, names: tuple[str, ...]) -> tuple[Choice, ...]:
        half = half_of(operation)
        able = [name for name in names if self._takes is None or self._takes(name, half)]
        choices = (self._priced(operation, name) for name in able)
        found = tuple(choice for choice in choices if choice is not None)
        if not found:
            raise UserError(
                f"no strategy of {', '.join(names)} can run {operation} for s={self._s}, "
                f"b={self._b}: allow others, or profile them at this length"
            )
        return tuple(choice for choice in found if choice.most_bytes < self._countable) or found

    def _priced(self, operation: str, name: str) -> Choice | None:
        costs, size, half = self._costs, (self._s, self._b), half_of(operation)
        if self._forward_only and costs.evaluation is not None:
            numbers = costs.evaluation(operation, name, *size)
        else:
            numbers = costs.training(operation, name, *size)
            if numbers is not None and self._forward_only:
                seconds, kept, forward, _ = numbers
                numbers = (seconds, 0, kept + forward, 0)
        if numbers is None:
            return None
        if self._forward_only:
            seconds, kept, forward, backward = numbers
            numbers = (seconds, kept, forward + self._inputs(half), backward)
        return _choice(name, numbers, self._memory.gathers(half, name, *size))

    def _inputs(self, half: str) -> int:
        """Of an evaluation, beside what the embedding keeps: its own input, and its layer's."""
        return (1 if half == ATTENTION else 2) * self._memory.input_bytes(self._s, self._b)


def _choice(name: str, numbers: Numbers, gathers: bool) -> Choice:
    seconds, kept, forward, backward = numbers
    sizes = (math.ceil(kept), math.ceil(forward), math.ceil(backward))
    return Choice(name, seconds, *sizes, gathers)
