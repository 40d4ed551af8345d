"""What a planner needs of a pipeline stage, from costs per strategy and operation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_paradyse.costs.layers import Operations
from megatron_paradyse.costs.model import CostModel
from megatron_paradyse.costs.packed import LOCAL
from megatron_paradyse.costs.recomputed import recomputed_layer
from megatron_paradyse.costs.row_costs import RowCosts
from megatron_paradyse.costs.table import EMBEDDING, HEAD, MLP, MODEL, PREDICTION, OperationCosts
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.load import Load, rounded_up
from megatron_paradyse.packing.row import Row
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.plan import MEGATRON_TS
from megatron_paradyse.planner.policies import Runs
from megatron_paradyse.planner.sources import CostSource, Numbers, RowSource, StageMemory
from megatron_paradyse.strategies import (
    OFFLOAD,
    RECOMPUTE,
    base_name,
    limited,
    offloads,
    recomputes,
    takes,
    takes_wide,
)
from megatron_paradyse.strategies.contract import Microbatch

# of strategy, operation, s, b: a CostModel's method `operation`, or a table of measurements
CostsOf = Callable[[str, str, int, int], OperationCosts]
# of +recompute -> of +offload: a CostModel's method `offloaded`
Offloaded = Callable[[OperationCosts], OperationCosts]
# costs -> the same as measurements correct them
Correct = Callable[[CostsOf], CostsOf]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The part of the model that a rank's transformer block belongs to.

    static_bytes: what stays through the training; buffer_bytes_per_token: of the buffer into which
    Megatron gathers a microbatch, per token of it (s b): of every microbatch, or where
    buffer_free_above says so, of those of at most so many tokens, and above of those whose plan
    names megatron_ts; mlp_free_above: but not for the MLP that recomputes more tokens than these;
    angle_bytes_per_position: of RoPE's table, which every rank has for all positions;
    input_bytes_per_token: of a layer's input on a rank, per token of the microbatch; host_bytes:
    what +offload may take of host memory, None without limit; num_in_flight: forwards that wait for
    their backward at once; held_besides: inputs that the schedule holds for each of them
    (pipeline.py); margin: how far a real peak may be above its estimate, as a share of it;
    num_predicting: its layers of multi-token prediction, which a stage with the head has;
    waiting_bytes: of static_bytes, the gradient of tied embeddings, which is there from the head's
    backward on: its costs have it too.
    """

    budget_bytes: int
    static_bytes: int
    has_embedding: bool = True
    has_head: bool = True
    buffer_bytes_per_token: int = 0
    buffer_free_above: int | None = None
    mlp_free_above: int | None = None
    angle_bytes_per_position: int = 0
    input_bytes_per_token: float = 0.0
    host_bytes: int | None = None
    num_in_flight: int = 1
    held_besides: float = 0.0
    margin: float = 0.0
    num_predicting: int = 0
    waiting_bytes: int = 0

    @property
    def edges(self) -> dict[str, int]:
        """The operations of the model that it runs, and how often."""
        counts = {
            EMBEDDING: int(self.has_embedding),
            PREDICTION: self.num_predicting,
            HEAD: int(self.has_head),
        }
        return {operation: count for operation, count in counts.items() if count}


def cost_source(costs_of: CostsOf, offloaded: Offloaded | None = None) -> CostSource:
    """Costs of training and of evaluation; offloaded: needed where strategies offload.

    A layer whose halves both recompute keeps its input where its attention's choice says. A
    forward without gradient costs what the forward of +recompute does: it keeps its input while it
    runs, and its output after it. Where that has no costs, those of the strategy are a bound.
    """

    def training(operation: str, strategy: str, s: int, b: int) -> Numbers:
        return _numbers(costs_of(strategy, operation, s, b))

    def pairs(attention: str, mlp: str, s: int, b: int, of: Operations) -> Numbers | None:
        if not (recomputes(attention) and recomputes(mlp)):
            return None
        costs = recomputed_layer(attention, mlp, lambda name, half: costs_of(name, half, s, b), of)
        if offloads(attention):
            assert offloaded is not None, "whoever names +offload gives its costs"
            costs = offloaded(costs)
        return _numbers(costs)

    def evaluation(operation: str, strategy: str, s: int, b: int) -> Numbers:
        base = base_name(strategy)
        try:
            costs = costs_of(base + RECOMPUTE, operation, s, b)
        except UserError:
            costs = costs_of(base, operation, s, b)
        return costs.forward_seconds, 0, costs.kept_bytes + costs.forward_bytes, 0

    return CostSource(training, pairs, evaluation, same_pair=_same_pair, tries=_tries)


def row_source(model: CostModel, correct: Correct, *, alignment: int) -> RowSource:
    """Costs of packed rows; alignment: their s is planned as a multiple of it."""
    packed = model.packed
    assert packed is not None

    @functools.lru_cache(maxsize=16)  # a summary and a trace ask again for the row planned
    def load(row: Row) -> Load:
        return rounded_up(
            packed.load_of(row), alignment=alignment, causal=packed.causal, window=packed.window
        )

    def costs(load: Load) -> CostSource:
        return cost_source(correct(RowCosts(model, load)), model.offloaded)

    return RowSource(load, costs, _takes)


def limits(strategies: Sequence[str], p: int) -> Runs | None:
    """Of strategies of other packages, what each says of a microbatch; None where none does.

    Built-in ones run any but LOCAL, whose rows RowSource knows.
    """
    names = frozenset(limited(strategies))

    def runs(strategy: str, b: int, s: int, row: Row | None) -> bool:
        if strategy not in names or (row is not None and row.groups > 1):
            return True
        return takes(strategy, Microbatch(s, b) if row is None else microbatch_of(row), p)

    return runs if names else None


def _takes(strategy: str, half: str, load: Load | None) -> bool:
    if load is not None and load.groups > 1:
        return base_name(strategy) != LOCAL and (half == MLP or takes_wide(strategy))
    return base_name(strategy) != LOCAL or (load is not None and not load.crosses)


def stage_memory(costs_of: CostsOf, stage: Stage) -> StageMemory:
    """The memory besides the layers, as functions of (s, b).

    What multi-token prediction keeps beside its layers counts from beginning to end, though only
    its own layers meet all of it: they run when most is kept. In their backward the gradient of all
    that the head got waits too, one tensor.
    What a layer keeps has its output, not its input. So a stage without the embedding holds the
    input that it received besides, until its backward. Megatron frees the output of a stage without
    the head once that is sent; this counts it until the backward of its last operation.
    """

    def of_model(operation: str, s: int, b: int) -> OperationCosts:
        return costs_of(MODEL, operation, s, b)

    def always_gathers(s: int, b: int) -> bool:
        return stage.buffer_free_above is None or s * b <= stage.buffer_free_above

    def input_bytes(s: int, b: int) -> int:
        return math.ceil(stage.input_bytes_per_token * s * b)

    def waiting_bytes(s: int, b: int) -> int:
        predicting = stage.num_predicting
        return (1 + predicting) * input_bytes(s, b) if predicting else 0

    def kept(s: int, b: int) -> int:
        begin = of_model(EMBEDDING, s, b).kept_bytes if stage.has_embedding else input_bytes(s, b)
        if stage.num_predicting:
            begin += stage.num_predicting * of_model(PREDICTION, s, b).kept_bytes
            begin += waiting_bytes(s, b)
        begin += stage.held_besides * input_bytes(s, b)
        buffer = stage.buffer_bytes_per_token if always_gathers(s, b) else 0
        return int(begin) + buffer * s * b + stage.angle_bytes_per_position * s

    def gather_bytes(s: int, b: int) -> int:
        return 0 if always_gathers(s, b) else stage.buffer_bytes_per_token * s * b

    def gathers(half: str, strategy: str, s: int, b: int) -> bool:
        limit = stage.mlp_free_above
        if limit is not None and half == MLP and recomputes(strategy) and s * b > limit:
            return False  # it goes in tiles, and not through Megatron's own linears
        return base_name(strategy) == MEGATRON_TS

    def workspace(costs: OperationCosts, backward: bool) -> float:
        return max(costs.forward_bytes, costs.backward_bytes if backward else 0.0)

    def embedding_peak(s: int, b: int, *, backward: bool) -> int:
        if not stage.has_embedding:
            return 0
        return int(workspace(of_model(EMBEDDING, s, b), backward))

    def head_peak(s: int, b: int, *, backward: bool) -> int:
        if not stage.has_head:
            return 0
        costs = of_model(HEAD, s, b)
        peak = costs.kept_bytes + workspace(costs, backward)
        peak = max(0, peak - waiting_bytes(s, b) - stage.waiting_bytes)
        if stage.num_predicting:
            peak = max(peak, workspace(of_model(PREDICTION, s, b), backward))
        return int(peak)

    return StageMemory(
        budget_bytes=stage.budget_bytes,
        static_bytes=stage.static_bytes,
        embedding_kept=kept,
        embedding_peak=embedding_peak,
        head_peak=head_peak,
        gather_bytes=gather_bytes,
        gathers=gathers,
        input_bytes=input_bytes,
        host_bytes=stage.host_bytes,
        num_in_flight=stage.num_in_flight,
        margin=stage.margin,
        angle_bytes_per_position=stage.angle_bytes_per_position,
    )


def model_seconds(
    costs_of: CostsOf, stage: Stage, s: int, b: int, *, forward_only: bool = False
) -> float:
    """All but the layers."""
    costs = [(count, costs_of(MODEL, part, s, b)) for part, count in stage.edges.items()]
    return sum(n * (c.forward_seconds if forward_only else c.time_seconds) for n, c in costs)


def prediction_seconds(costs_of: CostsOf, stage: Stage, s: int, b: int) -> float:
    """What multi-token prediction does beside its layers and the head."""
    count = stage.num_predicting
    return count * costs_of(MODEL, PREDICTION, s, b).time_seconds if count else 0.0


def _same_pair(attention: str, mlp: str) -> tuple[str, str]:
    """Where both halves recompute, the MLP's name need not say where the layer's input waits."""
    if recomputes(attention) and recomputes(mlp):
        return attention, base_name(mlp) + (OFFLOAD if offloads(attention) else RECOMPUTE)
    return attention, mlp


def _tries(attention: str, mlp: str) -> bool:
    """Inputs of whole layers go to the host, those of halves only where a plan is written so.

    A byte kept by a half and one kept by a layer cost the same copy: with both to choose from,
    plans of equal worth are too many to search, and hardly any is better (docs/planner.md).
    """
    return (recomputes(attention) and recomputes(mlp)) or not (offloads(attention) or offloads(mlp))


def _numbers(costs: OperationCosts) -> Numbers:
    return costs.time_seconds, costs.kept_bytes, costs.forward_bytes, costs.backward_bytes
