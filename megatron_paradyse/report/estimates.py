"""What fixed strategies would have cost on the stage of a trace, by a cost file."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from megatron_paradyse.costs.correction import Correction, corrected
from megatron_paradyse.costs.cost_file import CostFile
from megatron_paradyse.planner.from_file import UNLIMITED, Costs, FilePolicies
from megatron_paradyse.planner.known import known_strategies
from megatron_paradyse.planner.policies import CostPolicy
from megatron_paradyse.report.records import Run
from megatron_paradyse.settings import Settings
from megatron_paradyse.strategies import offloads


def cost_policies(
    costs: CostFile, run: Run | None, factors: Mapping[str, float]
) -> list[CostPolicy]:
    """The policies of a rank; run: what the trace says of it; factors: on seconds, by strategy.

    Without the run's stage, that of the whole model on one stage, within the run's budget if it
    has one.
    """
    model = costs.require_model()
    known = known_strategies(model)
    chosen = [name for name in run.strategies if name in known] if run is not None else []
    names = tuple(chosen or (name for name in known if not offloads(name)))
    budget = None if run is None else run.memory_budget_bytes
    policies = FilePolicies(
        Settings(memory_margin=0.0 if run is None else run.memory_margin),
        Costs(costs, names, names),
        UNLIMITED if budget is None else budget,
    )
    correction = Correction(known)
    correction.set_seconds(factors)
    correct = functools.partial(corrected, correction=correction)
    stages = run.stages if run is not None and run.stages else (policies.stage(),)
    return [policies.policy(stage, smooth=False, correct=correct) for stage in stages]
