"""Policies that choose by cost: they satisfy megatron_paradyse.policy.Policy."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_paradyse.costs.layers import ALIKE, ATTENTION, MLP, Operations
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import Load
from megatron_paradyse.packing.row import Row, aligned, of_each
from megatron_paradyse.plan import Plan, uniform_plan
from megatron_paradyse.planner.cache import CAPACITY, CachedPlanner, SmoothedPlanner
from megatron_paradyse.planner.gain import GainPlanner
from megatron_paradyse.planner.heuristic import HeuristicPlanner
from megatron_paradyse.planner.layer_options import OptionsMaker
from megatron_paradyse.planner.optimal import OptimalPlanner
from megatron_paradyse.planner.peak import evaluate, with_margin
from megatron_paradyse.planner.pipeline import UNLIMITED, shares
from megatron_paradyse.planner.problem import (
    MOST_BYTES,
    LayerOptions,
    Outcome,
    Planner,
    Problem,
    TooLargeError,
)
from megatron_paradyse.planner.sources import CostSource, RowSource, StageMemory
from megatron_paradyse.strategies import offloads
from megatron_paradyse.units import bytes_text

logger = logging.getLogger(__name__)

# of layer number, "attention" or "mlp": the strategies that it may run
Allowed = Callable[[int, str], tuple[str, ...]]
# of layer number: of which operations its halves have the costs
OperationsOf = Callable[[int], Operations]
# of a strategy, b, s and the row of a packed microbatch: whether it can run that
Runs = Callable[[str, int, int, Row | None], bool]


@dataclass(eq=False)
class CostPolicy:
    """Asks a planner, once per shape; the same answer on every rank with the same numbers."""

    planner: Planner
    strategies: tuple[str, ...]
    costs: CostSource
    memory: StageMemory
    granularity: str = "operation"
    allowed: Allowed | None = None
    operations: OperationsOf | None = None
    alignment: int = 1
    gamma: float | None = None
    refuse: bool = False
    capacity: int = CAPACITY
    rows: RowSource | None = None
    runs: Runs | None = None
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

        row: the documents of a packed microbatch, of which s (of a wide row a group's) and b = 1
        are then those. Where nothing fits: the least peak with a warning, or UserError if told to
        refuse.
        """
        numbers = tuple(layer_numbers)
        planner = self._planners.get(numbers)
        if planner is None:
            planner = self._planners[numbers] = self._make_planner(numbers)
        barred = self.barred(batch_size, seq_length, row)
        if row is None:
            more: tuple = (None, barred) if barred else ()
            outcome = planner.plan(batch_size, seq_length, forward_only, *more)
        else:
            assert (row.group_length, 1) == (seq_length, batch_size), "s and b of the row"
            load = self._rows.load(row)
            if row.groups > 1 and isinstance(planner, SmoothedPlanner):
                planner = planner.cached  # the groups must plan alike, and have seen other rows
            more = (load, barred) if barred else (load,)
            outcome = planner.plan(1, load.seq_length, forward_only, *more)
        if outcome.exceeds_bytes:
            self._exceeds(outcome, batch_size, seq_length, row)
        return outcome

    def barred(self, batch_size: int, seq_length: int, row: Row | None = None) -> frozenset[str]:
        """The strategies that cannot run such a microbatch, as they say themselves."""
        runs = self.runs
        if runs is None:
            return frozenset()
        shape = batch_size, seq_length, row
        return frozenset(name for name in self.strategies if not runs(name, *shape))

    def has_room(self, peak_bytes: int) -> bool:
        """Whether a plan of so large an estimated peak fits."""
        return peak_bytes <= self._room

    @property
    def _room(self) -> int:
        """The bytes that a plan's estimated peak may reach."""
        return with_margin(self.memory.budget_bytes, self.memory.margin)

    def predict(
        self, plan: Plan, batch_size: int, seq_length: int, *, row: Row | None = None
    ) -> Outcome | None:
        """Seconds and peak of a microbatch's given plan; None if its costs are not known."""
        load = None if row is None else self._rows.load(row)
        s = aligned(seq_length, self.alignment) if load is None else load.seq_length
        problem = self.problem(tuple(plan.layers), batch_size, s, False, load)
        return evaluate(problem, plan)

    def uniforms(
        self,
        batch_size: int,
        seq_length: int,
        layer_numbers: Sequence[int],
        load: Load | None = None,
        *,
        barred: frozenset[str] = frozenset(),
    ) -> dict[str, Outcome]:
        """What each strategy alone on every layer would cost, of those that may run everywhere.

        load: of a packed microbatch; barred: what cannot run it.
        """
        numbers = tuple(layer_numbers)
        problem = self.problem(numbers, batch_size, seq_length, False, load, barred)
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

    def hold(self, static_bytes: int) -> None:
        """Plan from now on with so many bytes held all the time."""
        self.memory = dataclasses.replace(self.memory, static_bytes=static_bytes)
        self.renew()

    def problem(
        self,
        numbers: tuple[int, ...],
        batch_size: int,
        seq_length: int,
        forward_only: bool,
        load: Load | None = None,
        barred: frozenset[str] = frozenset(),
    ) -> Problem:
        """The numbers of one microbatch, as the planner sees them; load: of a packed one; barred:
        what it cannot be run by.
        """
        memory, budget = self.memory, self._room
        kept = memory.embedding_kept(seq_length, batch_size) + memory.more_angles(seq_length, load)
        others, tail = 0, 0
        if not forward_only and memory.budget_bytes < UNLIMITED:  # else there is nothing to share
            others, tail = shares(budget - memory.static_bytes, memory.num_in_flight)
        rows = self.rows
        options = OptionsMaker(
            self.costs if load is None else self._rows.costs(load),
            memory,
            batch_size=batch_size,
            seq_length=seq_length,
            forward_only=forward_only,
            countable=MOST_BYTES // (4 * len(numbers)),  # a layer has two halves, and pairs of two
            takes=None if rows is None else (lambda name, half: rows.takes(name, half, load)),
        )
        most = memory.layers_on_host(seq_length, batch_size)
        layers = self._layers(numbers, options, barred, most)
        whole = sum(n * alike.most_bytes for alike, n in Counter(layers.values()).items())
        if whole >= MOST_BYTES:
            raise TooLargeError(
                f"s={seq_length:,}, b={batch_size:,}: its layers may hold {bytes_text(whole)}, and "
                f"plans count less than {bytes_text(MOST_BYTES)}: give fewer tokens"
            )
        return Problem(
            layers,
            budget,
            base_bytes=memory.static_bytes + others + kept,
            head_bytes=memory.head_peak(seq_length, batch_size, backward=not forward_only),
            tail_bytes=tail,
            embedding_bytes=memory.embedding_peak(
                seq_length, batch_size, backward=not forward_only
            ),
            gather_bytes=memory.gather_bytes(seq_length, batch_size),
            granularity=self.granularity,
            forward_only=forward_only,
        )

    def _make_planner(self, numbers: tuple[int, ...]) -> CachedPlanner | SmoothedPlanner:
        cached = CachedPlanner(
            self.planner,
            functools.partial(self.problem, numbers),
            alignment=self.alignment,
            capacity=self.capacity,
        )
        return cached if self.gamma is None else SmoothedPlanner(cached, gamma=self.gamma)

    @property
    def _rows(self) -> RowSource:
        assert self.rows is not None, "whoever plans packed rows gives their costs"
        return self.rows

    def _layers(
        self,
        numbers: tuple[int, ...],
        options: OptionsMaker,
        barred: frozenset[str],
        most: int | None,
    ) -> dict[int, LayerOptions]:
        """By number; layers with the same choices share them. most: layers that may offload."""
        made: dict[tuple[Operations, tuple[str, ...], tuple[str, ...]], LayerOptions] = {}
        layers = {}
        for place, number in enumerate(numbers):
            of = ALIKE if self.operations is None else self.operations(number)
            first, second = self._allowed(number, ATTENTION), self._allowed(number, MLP)
            if most is not None and place >= most:
                # What the first layers keep, they keep for longest.
                first, second = _without_offload(first), _without_offload(second)
            if barred:
                first, second = (
                    tuple(name for name in half if name not in barred) for half in (first, second)
                )
            if (of, first, second) not in made:
                made[of, first, second] = options(of, (first, second))
            layers[number] = made[of, first, second]
        return layers

    def _allowed(self, number: int, operation: str) -> tuple[str, ...]:
        return self.strategies if self.allowed is None else self.allowed(number, operation)

    def _exceeds(self, outcome: Outcome, batch_size: int, seq_length: int, row: Row | None) -> None:
        message = (
            f"no plan for s={seq_length}{of_each(row)}, b={batch_size} fits: the least peak is "
            f"{bytes_text(outcome.peak_bytes)}, {bytes_text(outcome.exceeds_bytes)} above the "
            "budget"
        )
        if self.refuse:
            raise UserError(f"{message}: shorten documents, add ranks, or raise the budget")
        if (batch_size, seq_length) not in self._warned:
            self._warned.add((batch_size, seq_length))
            logger.warning("%s: it may run out of memory", message)


class OptimalPolicy(CostPolicy):
    """The fastest plan within the budget; of several strategies only for a gain."""

    def __init__(
        self, strategies, costs: CostSource, memory: StageMemory, *, gain: float = 0.0, **settings
    ):
        planner = OptimalPlanner() if gain == 0.0 else GainPlanner(OptimalPlanner(), gain=gain)
        super().__init__(planner, tuple(strategies), costs, memory, **settings)
        self.gain = gain


class HeuristicPolicy(CostPolicy):
    """Algorithm 1 of the paper, with its smoothing."""

    def __init__(self, strategies, costs: CostSource, memory: StageMemory, **settings):
        planner = settings.pop("planner", None) or HeuristicPlanner()
        settings.setdefault("gamma", 0.05)
        super().__init__(planner, tuple(strategies), costs, memory, **settings)


def _without_offload(names: tuple[str, ...]) -> tuple[str, ...]:
    """All of them where there is nothing else: then it was asked for."""
    return tuple(name for name in names if not offloads(name)) or names
