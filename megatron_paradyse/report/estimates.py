"""What fixed strategies would have cost on the stage of a trace, by a cost file."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from megatron_paradyse.costs.correction import MOST_FACTOR, Correction, corrected
from megatron_paradyse.costs.cost_file import CostFile
from megatron_paradyse.packing.load import Load
from megatron_paradyse.planner.cost_settings import Costs
from megatron_paradyse.planner.from_costs import Stage
from megatron_paradyse.planner.from_file import FilePolicies
from megatron_paradyse.planner.known import known_for_rows, known_strategies
from megatron_paradyse.planner.pipeline import UNLIMITED
from megatron_paradyse.planner.policies import CostPolicy
from megatron_paradyse.report.records import Corrected, Run
from megatron_paradyse.settings import Settings
from megatron_paradyse.strategies import offloads

NO_LOAD = "they need the trace of a run planned by cost, and a cost file of the same model"


def cost_policies(
    costs: CostFile, run: Run | None, corrections: Corrected | None
) -> list[tuple[Stage, CostPolicy]]:
    """The policies of a rank and what they fit; run: what the trace says of it.

    Without the run's stage, that of the whole model on one stage, within the run's budget if it
    has one.
    """
    model = costs.require_model()
    known = known_for_rows(model)
    chosen = [name for name in run.strategies if name in known] if run is not None else []
    names = tuple(chosen or (name for name in known_strategies(model) if not offloads(name)))
    budget = None if run is None else run.memory_budget_bytes
    policies = FilePolicies(
        Settings(memory_margin=0.0 if run is None else run.memory_margin),
        Costs(costs, names, names),
        UNLIMITED if budget is None else budget,
        wide_bytes_per_second=math.inf if run is None else run.wide_bytes_per_second,
    )
    correct = functools.partial(corrected, correction=_correction(known, corrections))
    stages = run.stages if run is not None and run.stages else (policies.stage(),)
    return [(stage, policies.policy(stage, smooth=False, correct=correct)) for stage in stages]


def prices_rows_of(costs: CostFile, load: Load) -> bool:
    """Whether the file tells what packed rows of such a load cost."""
    packed = costs.require_model().packed
    return packed is not None and (packed.window is None or load.within is not None)


def _correction(strategies: Sequence[str], told: Corrected | None) -> Correction:
    """The factors that a trace tells, in force."""
    correction = Correction(strategies)
    if told is not None:
        correction.set_seconds(told.seconds_factors, told.hopes)
        factors = [told.bytes_factors.get(name, 1.0) for name in correction.names]
        correction.bytes = np.clip(factors, 1.0, MOST_FACTOR)
    return correction


def policy_of(
    policies: Sequence[tuple[Stage, CostPolicy]], layers: Sequence[int], num_layers: int
) -> CostPolicy:
    """That of the chunk of a pipeline stage that has these layers.

    Chunks of one rank differ by embedding and head alone, which go with the first and last layer.
    """
    ends = (min(layers) == 1, max(layers) == num_layers)
    for stage, policy in policies:
        if (stage.has_embedding, stage.has_head) == ends:
            return policy
    return policies[0][1]
