"""Policies that choose by cost: they satisfy megatron_paradyse.policy.Policy."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.row import Row
from megatron_paradyse.plan import Plan, uniform_plan
from megatron_paradyse.planner.cache import CAPACITY, CachedPlanner, SmoothedPlanner
from megatron_paradyse.planner.heuristic import HeuristicPlanner
from megatron_paradyse.planner.optimal import OptimalPlanner
from megatron_paradyse.planner.peak import evaluate, with_margin
from megatron_paradyse.planner.pipeline import shares
from megatron_paradyse.planner.problem import Choice, LayerOptions, Outcome, Planner, Problem

logger = logging.getLogger(__name__)

# (seconds, kept_bytes, forward_bytes, backward_bytes), or None where it cannot run this shape
Numbers = Sequence[float]
# of operation ("attention", "mlp"), strategy, s, b
Costs = Callable[[str, str, int, int], Numbers | None]
# of attention strategy, MLP strategy, s, b: for pairs whose costs are not the sum of the two
PairCosts = Callable[[str, str, int, int], Numbers | None]
# of layer number, operation: the strategies that it may run
Allowed = Callable[[int, str], tuple[str, ...]]


def _nothing(seq_length: int, batch_size: int) -> int:
    return 0


def _never(strategy: str) -> bool:
    return False


@dataclass(frozen=True)
class StageMemory:
    """The memory of one pipeline stage, besides its layers.

    embedding and head give (s, b) -> bytes: what the embedding and buffers of this size keep, the
    embedding's peak, the head's peak. gather_bytes: of the buffer that is there besides if the
    plan names a strategy for which gathers is true.
    """

    budget_bytes: int
    static_bytes: int = 0
    embedding_kept: Callable[[int, int], int] = _nothing
    embedding_peak: Callable[[int, int], int] = _nothing
    head_peak: Callable[[int, int], int] = _nothing
    gather_bytes: Callable[[int, int], int] = _nothing
    gathers: Callable[[str], bool] = _never
    num_in_flight: int = 1
    kept_share: float = 0.75
    margin: float = 0.0


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
    evaluation_pairs: PairCosts | None = None
    same_pair: Callable[[str, str], tuple[str, str]] | None = None
    tries: Callable[[str, str], bool] | None = None


@dataclass(eq=False)
class CostPolicy:
    """Asks a planner, once per shape; the same answer on every rank with the same numbers."""

    planner: Planner
    strategies: tuple[str, ...]
    costs: CostSource
    memory: StageMemory
    granularity: str = "operation"
    allowed: Allowed | None = None
    alignment: int = 1
    gamma: float | None = None
    refuse: bool = False
    capacity: int = CAPACITY
    _planners: dict[tuple[int, ...], CachedPlanner | SmoothedPlanner] = field(default_factory=dict)
    _warned: set[tuple[int, int]] = field(default_factory=set)

    def plan(
        self,
        batch_size: int,
        seq_length: int,
        layer_numbers: Sequence[int],
        *,
        forward_only: bool = False,
        row: Row | None = None,
    ) -> Plan:
        shape = (batch_size, seq_length, layer_numbers)
        return self.outcome(*shape, forward_only=forward_only, row=row).plan

    def outcome(
        self,
        batch_size: int,
        seq_length: int,
        layer_numbers: Sequence[int],
        *,
        forward_only: bool = False,
        row: Row | None = None,
    ) -> Outcome:
        """The plan with its estimated seconds and peak.

        Where nothing fits: the least peak with a warning, or UserError if told to refuse.
        """
        numbers = tuple(layer_numbers)
        planner = self._planners.get(numbers)
        if planner is None:
            planner = self._planners[numbers] = self._make_planner(numbers)
        outcome = planner.plan(batch_size, seq_length, forward_only)
        if outcome.exceeds_bytes:
            self._exceeds(outcome, batch_size, seq_length)
        return outcome

    def uniforms(
        self, batch_size: int, seq_length: int, layer_numbers: Sequence[int]
    ) -> dict[str, Outcome]:
        """What each strategy alone on every layer would cost, of those that may run everywhere."""
        numbers = tuple(layer_numbers)
        problem = self.problem(numbers, batch_size, seq_length, False)
        outcomes = {
            name: evaluate(problem, uniform_plan(numbers, name)) for name in self.strategies
        }
        return {name: outcome for name, outcome in outcomes.items() if outcome is not None}

    def forget(self) -> None:
        """Drop the previous plans that smoothing would keep: as after a restart."""
        for planner in self._planners.values():
            if isinstance(planner, SmoothedPlanner):
                planner.previous.clear()

    def renew(self) -> None:
        """Plan anew from now on: the costs give other numbers. What smoothing keeps stays."""
        for planner in self._planners.values():
            planner.clear()

    def problem(
        self, numbers: tuple[int, ...], batch_size: int, seq_length: int, forward_only: bool
    ) -> Problem:
        """The numbers of one microbatch, as the planner sees them."""
        memory = self.memory
        budget = with_margin(memory.budget_bytes, memory.margin)
        kept = memory.embedding_kept(seq_length, batch_size)
        others, tail = 0, 0
        if not forward_only:
            others, tail = shares(
                budget - memory.static_bytes, memory.num_in_flight, kept_share=memory.kept_share
            )
        made: dict[tuple[tuple[str, ...], tuple[str, ...]], LayerOptions] = {}
        layers = {}
        for number in numbers:
            names = (self._allowed(number, "attention"), self._allowed(number, "mlp"))
            if names not in made:
                made[names] = self._options(*names, seq_length, batch_size, forward_only)
            layers[number] = made[names]
        return Problem(
            layers,
            budget,
            base_bytes=memory.static_bytes + others + kept,
            head_bytes=memory.head_peak(seq_length, batch_size),
            tail_bytes=tail,
            embedding_bytes=memory.embedding_peak(seq_length, batch_size),
            gather_bytes=memory.gather_bytes(seq_length, batch_size),
            granularity=self.granularity,
            forward_only=forward_only,
        )

    def _make_planner(self, numbers: tuple[int, ...]) -> CachedPlanner | SmoothedPlanner:
        cached = CachedPlanner(
            self.planner,
            lambda b, s, forward_only: self.problem(numbers, b, s, forward_only),
            alignment=self.alignment,
            capacity=self.capacity,
        )
        return cached if self.gamma is None else SmoothedPlanner(cached, gamma=self.gamma)

    def _allowed(self, number: int, operation: str) -> tuple[str, ...]:
        return self.strategies if self.allowed is None else self.allowed(number, operation)

    def _options(self, attention, mlp, s: int, b: int, forward_only: bool) -> LayerOptions:
        halves = []
        for operation, names in (("attention", attention), ("mlp", mlp)):
            half = [self._choice(operation, name, s, b, forward_only) for name in names]
            halves.append(tuple(choice for choice in half if choice is not None))
            if not halves[-1]:
                raise UserError(
                    f"no strategy of {', '.join(names)} can run {operation} for s={s}, b={b}: "
                    "allow others, or profile them at this length"
                )
        source = self.costs.evaluation_pairs if forward_only else self.costs.pairs
        if source is None:
            return LayerOptions(halves[0], halves[1])
        offered = [(first.name, second.name) for first in halves[0] for second in halves[1]]
        pairs, same = {}, self._same_pairs(set(offered))
        for first in halves[0]:
            for second in halves[1]:
                if (first.name, second.name) in same:
                    continue
                numbers = source(first.name, second.name, s, b)
                if numbers is not None:
                    gathers = first.gathers or second.gathers
                    pair = _make_choice(first.name, numbers, gathers)
                    pairs[first.name, second.name] = pair
        tries = self.costs.tries
        untried = [pair for pair in offered if tries is not None and not tries(*pair)]
        return LayerOptions(halves[0], halves[1], pairs, same, frozenset(untried))

    def _same_pairs(self, offered: set) -> dict[tuple[str, str], tuple[str, str]]:
        """Of pairs that run what another pair runs that is offered too: that pair."""
        if self.costs.same_pair is None:
            return {}
        same = {pair: self.costs.same_pair(*pair) for pair in offered}
        return {pair: other for pair, other in same.items() if other != pair and other in offered}

    def _choice(self, operation, name: str, s: int, b: int, forward_only: bool) -> Choice | None:
        if forward_only and self.costs.evaluation is not None:
            numbers = self.costs.evaluation(operation, name, s, b)
        else:
            numbers = self.costs.training(operation, name, s, b)
            if numbers is not None and forward_only:
                seconds, kept, forward, _ = numbers
                numbers = (seconds, 0, kept + forward, 0)
        if numbers is None:
            return None
        return _make_choice(name, numbers, self.memory.gathers(name))

    def _exceeds(self, outcome: Outcome, batch_size: int, seq_length: int) -> None:
        gib = 2.0**30
        message = (
            f"no plan for s={seq_length}, b={batch_size} fits: the least peak is "
            f"{outcome.peak_bytes / gib:.2f} GiB, {outcome.exceeds_bytes / gib:.2f} GiB above the "
            "budget"
        )
        if self.refuse:
            raise UserError(f"{message}: shorten documents, add ranks, or raise the budget")
        if (batch_size, seq_length) not in self._warned:
            self._warned.add((batch_size, seq_length))
            logger.warning("%s: it may run out of memory", message)


class OptimalPolicy(CostPolicy):
    """The fastest plan within the budget."""

    def __init__(self, strategies, costs: CostSource, memory: StageMemory, **settings):
        super().__init__(OptimalPlanner(), tuple(strategies), costs, memory, **settings)


class HeuristicPolicy(CostPolicy):
    """Algorithm 1 of the paper, with its smoothing."""

    def __init__(self, strategies, costs: CostSource, memory: StageMemory, **settings):
        planner = settings.pop("planner", None) or HeuristicPlanner()
        settings.setdefault("gamma", 0.05)
        super().__init__(planner, tuple(strategies), costs, memory, **settings)


def _make_choice(name: str, numbers: Numbers, gathers: bool) -> Choice:
    seconds, kept, forward, backward = numbers
    sizes = (math.ceil(kept), math.ceil(forward), math.ceil(backward))
    return Choice(name, seconds, *sizes, gathers)
