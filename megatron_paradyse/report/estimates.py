"""What fixed strategies would have cost on the stage of a trace, by a cost file."""

from __future__ import annotations

from megatron_paradyse.costs.cost_file import CostFile
from megatron_paradyse.costs.table import ATTENTION, MLP
from megatron_paradyse.planner.from_costs import Stage, cost_source, stage_memory
from megatron_paradyse.planner.policies import CostPolicy, OptimalPolicy
from megatron_paradyse.report.records import Run

ALIGNMENT = 64  # lengths are planned for as multiples of this (train/choosing.py)
NO_BUDGET = 1 << 62
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def cost_policies(costs: CostFile, run: Run | None) -> list[CostPolicy]:
    """The policies of a rank; run: what the trace says of it.

    Without the run's stage, that of the whole model on one stage, within the run's budget if it
    has one.
    """
    model = costs.require_model()
    known = [name for name in model.strategies(ATTENTION) if name in model.strategies(MLP)]
    chosen = [name for name in run.strategies if name in known] if run is not None else []
    stages = run.stages if run is not None else ()
    if not stages:
        budget = None if run is None else run.memory_budget_bytes
        stages = (_whole_model(costs, NO_BUDGET if budget is None else budget),)
    return [
        OptimalPolicy(
            chosen or known,
            cost_source(model.operation),
            stage_memory(model.operation, stage),
            alignment=ALIGNMENT,
        )
        for stage in stages
    ]


def _whole_model(costs: CostFile, budget_bytes: int) -> Stage:
    table = costs.table
    description = table.description
    token_bytes = 0
    if description.p > 1:
        size = DTYPE_BYTES.get(description.dtype, 4)
        token_bytes = description.model.hidden_size * size
    longest = max((m.seq_length * m.batch_size for m in table.measurements), default=0)
    static = max(0, int(table.constants.static_bytes) - longest * token_bytes)
    return Stage(budget_bytes=budget_bytes, static_bytes=static, buffer_bytes_per_token=token_bytes)
