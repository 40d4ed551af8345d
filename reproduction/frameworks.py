"""A framework: how microbatches get their plans, and what they then take.

Plans are made by the code that training plans with (planner/from_file.py). What they take is told
by the package's own fit: a framework that plans by other costs may be wrong about its plans, even
run out of memory. It then ends, as a training would.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_paradyse.costs.hybrid import HybridFit
from megatron_paradyse.costs.model import HYBRID, PAPER, CostModel
from megatron_paradyse.planner import evaluate
from megatron_paradyse.planner.from_file import ALIGNMENT, planned_length
from megatron_paradyse.planner.policies import CostPolicy
from megatron_paradyse.planner.problem import Outcome
from megatron_paradyse.preview.forecast import alone, edge_seconds
from megatron_paradyse.preview.longest import longest
from megatron_paradyse.preview.setup import Setup, make_setup
from reproduction.costs import TILED, UNTILED, ModelCosts
from reproduction.names import AS_PUBLISHED, FIXED, PARADYSE

MOST_TOKENS = 1 << 25  # beyond any length that trains here


@dataclass(frozen=True)
class Framework:
    """flags: of Settings, as --paradyse-*; forest False: only what the fit says without one."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    fit: str = HYBRID
    head: str = TILED
    forest: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        return self.flags | ({"head_tile": "off"} if self.head == UNTILED else {})

    @property
    def knows_costs(self) -> bool:
        """Whether it plans by the costs that its plans are judged by."""
        return self.fit == HYBRID and self.forest


def ours(name: str = PARADYSE, **changes: Any) -> Framework:
    """The defaults: exact planning, halves of layers, recomputation, tiles; no host memory."""
    return Framework(
        name, {"policy": "optimal", "offload": False} | changes.pop("flags", {}), **changes
    )


def as_published(name: str = AS_PUBLISHED, **changes: Any) -> Framework:
    """Algorithm 1 on whole layers, the published fit, no recomputation, Megatron's own head."""
    flags = {"policy": "heuristic", "granularity": "layer", "strategies": ",".join(FIXED)}
    defaults = {"fit": PAPER, "head": UNTILED}
    return Framework(name, flags | changes.pop("flags", {}), **(defaults | changes))


@dataclass(frozen=True)
class Ran:
    """One microbatch, forward and backward: seconds None where it does not fit.

    peak_bytes: None where they are more than the planner counts.
    """

    tokens: int
    seconds: float | None
    peak_bytes: int | None
    plan: str = ""


class Runner:
    """A framework on one model: what it plans, and what that takes."""

    def __init__(self, costs: ModelCosts, framework: Framework):
        self.framework = framework
        path = str(costs.path(framework.fit, framework.head))
        self.setup = make_setup(path, framework.settings)
        policies = self.setup.policies
        self.truth = self.setup
        if not framework.knows_costs:
            self.truth = make_setup(str(costs.path(HYBRID, framework.head)), framework.settings)
            if not framework.forest:
                policies.model = without_forest(policies.model)
        self._policy = policies.policy(self.setup.stage, smooth=False)

    def run(self, lengths: Iterable[int]) -> Iterator[Ran]:
        """The documents in their order: smoothing, where there is any, begins anew."""
        policies = self.setup.policies
        policy = policies.policy(self.setup.stage)
        for tokens in lengths:
            yield self._ran(policy, int(tokens))

    def longest_tokens(self) -> int:
        """The longest sequence that it trains, by bisection, without smoothing."""
        step = math.lcm(ALIGNMENT, 2 * self.setup.description.p)

        def fits(tokens: int) -> bool:
            return self._ran(self._policy, tokens).seconds is not None

        return longest(fits, step, most=MOST_TOKENS)

    def _ran(self, policy: CostPolicy, tokens: int) -> Ran:
        outcome = policy.outcome(1, tokens, self.setup.layers)
        planned = planned_length(tokens)
        real = outcome if self.framework.knows_costs else self._judge(outcome, planned)
        # A margin is kept when planning; a plan made by other costs may use it up.
        fits = outcome.fits and real.peak_bytes <= self.truth.stage.budget_bytes
        seconds = real.seconds + edge_seconds(self.truth, planned, 1) if fits else None
        return Ran(tokens, seconds, real.peak_bytes, outcome.plan.runs())

    def _judge(self, outcome: Outcome, planned: int) -> Outcome:
        problem = self.truth.policy.problem(self.truth.layers, 1, planned, False)
        real = evaluate(problem, outcome.plan)
        assert real is not None, "both know the same strategies"
        return real


class FixedRunner:
    """Every strategy alone on all layers."""

    def __init__(self, costs: ModelCosts, head: str = TILED):
        self.setup: Setup = make_setup(str(costs.path(HYBRID, head)), ours(head=head).settings)

    def run(self, tokens: int) -> dict[str, Ran]:
        """By strategy, those with +recompute too."""
        planned = planned_length(tokens)
        problem = self.setup.policy.problem(self.setup.layers, 1, planned, False)
        edges = edge_seconds(self.setup, planned, 1)
        counted = {
            name: Ran(tokens, o.seconds + edges if o.fits else None, o.peak_bytes)
            for name, o in alone(problem).items()
        }
        beyond = Ran(tokens, None, None)
        return {name: counted.get(name, beyond) for name in self.setup.policy.strategies}


def without_forest(model: CostModel) -> CostModel:
    """The laws of the package's fit, or the polynomials of the published one at every length."""
    fits = []
    for fit in model.fits:
        if model.kind == HYBRID:
            laws = tuple(HybridFit(one.law) for one in fit.fits if isinstance(one, HybridFit))
            fits.append(dataclasses.replace(fit, fits=laws))
        else:
            timed = tuple((b, 1, 1) for b, _, _ in fit.timed)  # the forest is asked up to there
            fits.append(dataclasses.replace(fit, min_length=1, max_length=1, timed=timed))
    return CostModel(model.kind, fits, model.constants)


def until_out_of_memory(ran: Iterable[Ran]) -> list[Ran]:
    """What a training does before its first microbatch that does not fit."""
    done = []
    for one in ran:
        if one.seconds is None:
            break
        done.append(one)
    return done
