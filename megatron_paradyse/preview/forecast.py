"""The plan of one length, and the plans that lost against it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_paradyse.costs.description import CAUSAL
from megatron_paradyse.costs.table import ATTENTION, MLP, MODEL
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import Load
from megatron_paradyse.packing.placement import alignment, place
from megatron_paradyse.packing.row import Row
from megatron_paradyse.plan import Plan
from megatron_paradyse.planner.from_costs import model_seconds
from megatron_paradyse.planner.from_file import planned_length
from megatron_paradyse.planner.gain import is_single
from megatron_paradyse.planner.heuristic import HeuristicPlanner
from megatron_paradyse.planner.peak import evaluate
from megatron_paradyse.planner.pipeline import UNLIMITED
from megatron_paradyse.planner.policies import CostPolicy
from megatron_paradyse.planner.problem import Outcome, Problem, preference, problem_less
from megatron_paradyse.planner.uniform import common_strategies, mixed_plan
from megatron_paradyse.preview.setup import Setup
from megatron_paradyse.strategies import names_of_costs
from megatron_paradyse.units import counted

LABELS = {ATTENTION: "attention", MLP: "MLP"}
UNIFORM, UNLIMITED_MEMORY, WITHOUT = "uniform", "unlimited memory", "without"


@dataclass(frozen=True)
class Rival:
    """A plan that was not chosen. kind: one of the three above; name: of what it is the best."""

    kind: str
    name: str
    outcome: Outcome


@dataclass(frozen=True)
class Forecast:
    """What training would run at (b, s): planned_length is s rounded up to the alignment.

    edge_seconds: of embedding and head, where the stage has them; profiled: whether the plan's
    costs were timed around this length at this b, and not extrapolated. row, load: of packed
    documents.
    """

    batch_size: int
    seq_length: int
    planned_length: int
    problem: Problem
    outcome: Outcome
    edge_seconds: float
    profiled: bool
    rivals: tuple[Rival, ...] = ()
    row: Row | None = None
    load: Load | None = None

    @property
    def title(self) -> str:
        """What is planned for."""
        if self.row is None:
            return counted(self.seq_length, "token")
        where = f", over {self.row.groups:,} replicas" if self.row.groups > 1 else ""
        documents = counted(len(self.row.lengths), "document")
        return f"{counted(self.row.num_tokens, 'token')} in {documents}{where}"

    @property
    def seconds(self) -> float:
        """Layers, embedding and head, forward and backward."""
        return self.outcome.seconds + self.edge_seconds

    def kept_single(self, setup: Setup) -> bool:
        """Whether a faster plan that fits gains too little by mixing strategies."""
        bound = self.outcome.bound_seconds
        return (
            setup.policies.gain > 0
            and self.outcome.fits
            and is_single(self.problem, self.outcome.plan)
            and bound is not None
            and bound < self.outcome.seconds * (1 - 1e-9)
        )


def forecast(
    setup: Setup,
    seq_length: int,
    batch_size: int = 1,
    *,
    forward_only: bool = False,
    rivals: bool = True,
) -> Forecast:
    """Ask the policy's planner, as training does for a microbatch of this shape."""
    shape = batch_size, planned_length(seq_length)
    barred = setup.policy.barred(batch_size, seq_length)
    return _forecast(setup, seq_length, shape, forward_only, rivals, None, barred)


def forecast_row(
    setup: Setup, documents: Sequence[int], *, forward_only: bool, spread: int
) -> Forecast:
    """The same for one microbatch of these documents, placed as training places them.

    spread: over so many replicas; their tokens are then those of each.
    """
    row = row_over(setup, documents, spread)
    load = setup.rows.load(row)
    shape = (1, load.seq_length)
    barred = setup.policy.barred(1, row.group_length, row)
    found = _forecast(setup, row.group_length, shape, forward_only, True, load, barred)
    return dataclasses.replace(found, row=row)


def row_over(setup: Setup, documents: Sequence[int], replicas: int) -> Row:
    """The documents on the ranks of so many replicas."""
    d = setup.description
    row = place(
        documents,
        d.p * replicas,
        causal=d.attention_mask == CAUSAL,
        alignment=alignment(d.p) * replicas,
        window=d.common_window,
    )
    return dataclasses.replace(row, groups=replicas)


def _forecast(
    setup: Setup,
    seq_length: int,
    shape: tuple[int, int],
    forward_only: bool,
    rivals: bool,
    load: Load | None,
    barred: frozenset[str],
) -> Forecast:
    """shape: b, and s as it is planned for; barred: strategies that cannot run this."""
    batch_size, planned = shape
    how = setup.layers, batch_size, planned, forward_only, load, barred
    problem = setup.policy.problem(*how)
    outcome = setup.policy.planner.plan(problem)
    free = _unlimited(setup).problem(*how) if rivals and setup.limited else None
    found = tuple(_rivals(setup, problem, outcome, free)) if rivals else ()
    return Forecast(
        batch_size,
        seq_length,
        planned,
        problem,
        outcome,
        edge_seconds(setup, planned, batch_size, forward_only=forward_only),
        _profiled(setup, outcome, seq_length, batch_size),
        found,
        load=load,
    )


def edge_seconds(setup: Setup, s: int, b: int, *, forward_only: bool = False) -> float:
    """Of all but the layers."""
    operation = setup.policies.model.operation
    return model_seconds(operation, setup.stage, s, b, forward_only=forward_only)


def alone(problem: Problem, names: Sequence[str] | None = None) -> dict[str, Outcome]:
    """What each strategy would take on all layers; empty where no strategy may run on all."""
    try:
        names = common_strategies(problem) if names is None else names
    except UserError:
        return {}
    outcomes = {name: evaluate(problem, mixed_plan(problem, name, name, 0)) for name in names}
    return {name: outcome for name, outcome in outcomes.items() if outcome is not None}


def _rivals(
    setup: Setup, problem: Problem, chosen: Outcome, free: Problem | None
) -> Iterator[Rival]:
    """free: the same problem without a limit of memory, if there is one."""
    others = {n: o for n, o in alone(problem).items() if o.plan != chosen.plan}
    fitting = {name: outcome for name, outcome in others.items() if outcome.fits}
    if fitting:
        name = min(fitting, key=lambda n: preference(fitting[n]))
        yield Rival(UNIFORM, name, fitting[name])
    if free is not None:
        judged = evaluate(problem, setup.policy.planner.plan(free).plan)
        if judged is not None and judged.plan != chosen.plan and not judged.fits:
            yield Rival(UNLIMITED_MEMORY, "", judged)
    other = _best_without(setup.policy, problem, chosen)
    if other is not None:
        yield other


def _unlimited(setup: Setup) -> CostPolicy:
    return setup.with_budget(UNLIMITED / setup.stage.budget_bytes)


def _best_without(policy: CostPolicy, problem: Problem, chosen: Outcome) -> Rival | None:
    """The best of the plans that do without one of the chosen plan's strategies in one half."""
    heuristic = isinstance(policy.planner, HeuristicPlanner)  # of what all layers offer alone
    whole = dataclasses.replace(problem, granularity="sequence") if heuristic else problem
    together = whole.granularity != "operation"
    used = {(ATTENTION, choice.attention) for choice in chosen.plan.layers.values()}
    used |= {(MLP, choice.mlp) for choice in chosen.plan.layers.values()}
    found = []
    for half, name in sorted(used):

        def drop(_, of, choice, half=half, name=name) -> bool:
            return choice.name == name and (together or of == half)

        try:
            less = problem_less(whole, drop)
            if less is None:
                continue
            less = dataclasses.replace(less, granularity=problem.granularity)
            outcome = policy.planner.plan(less)
        except UserError:  # no strategy is left that all layers may run
            continue
        if _runs(problem, outcome.plan) != _runs(problem, chosen.plan):
            found.append(Rival(WITHOUT, name if together else f"{name} {LABELS[half]}", outcome))
    return min(found, key=lambda rival: preference(rival.outcome), default=None)


def _runs(problem: Problem, plan: Plan) -> dict[int, tuple[str, str]]:
    """What layers run: of pairs of names that run the same, those that plans have."""
    names = {number: (choice.attention, choice.mlp) for number, choice in plan.layers.items()}
    return {n: problem.layers[n].same.get(pair, pair) for n, pair in names.items()}


def _profiled(setup: Setup, outcome: Outcome, s: int, b: int) -> bool:
    """Whether all that this plan does was timed at b, at lengths around s."""
    model = setup.policies.model
    halves = outcome.plan.halves(setup.policies.kinds.operations)
    used = {(operation, name) for name, operation in halves}
    used |= {(operation, part) for operation, name in used for part in names_of_costs(name)}
    used |= {(part, MODEL) for part in setup.stage.edges}
    known = {(fit.operation, fit.strategy) for fit in model.fits}
    ranges = [model.timed_range(name, half, b) for half, name in used if (half, name) in known]
    return all(found is not None and found[0] <= s <= found[1] for found in ranges)
