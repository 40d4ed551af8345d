"""The policies that choose by cost, from a cost file and the settings. No torch.

Training (train/choosing.py) and the commands that tell beforehand what training would choose
(preview/) both make their policies here.
"""

from __future__ import annotations

import dataclasses
import math

from megatron_paradyse.costs.description import ELEMENT_BYTES
from megatron_paradyse.costs.layers import HALVES, MLP
from megatron_paradyse.costs.packed import LOCAL
from megatron_paradyse.edges.tiles import AUTO, OFF, automatic_tile
from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.row import aligned
from megatron_paradyse.planner.cost_settings import Costs, ablations
from megatron_paradyse.planner.from_costs import (
    Correct,
    Stage,
    cost_source,
    limits,
    row_source,
    stage_memory,
)
from megatron_paradyse.planner.gain import mixing_gain
from megatron_paradyse.planner.heuristic import HeuristicPlanner
from megatron_paradyse.planner.pipeline import parameters
from megatron_paradyse.planner.policies import CostPolicy, HeuristicPolicy, OptimalPolicy
from megatron_paradyse.planner.sources import RowSource
from megatron_paradyse.policy import cost_policy_kind
from megatron_paradyse.settings import Settings
from megatron_paradyse.strategies import base_name, recomputes
from megatron_paradyse.strategies.sizes import TILE_ROWS
from megatron_paradyse.units import bytes_text, parse_bytes

# Lengths are planned for as the next multiple of this, so that like ones share a plan.
ALIGNMENT = 64
DEFAULT_GAMMA = 0.05  # smoothing of the heuristic, as in the paper
RESERVE_SHARE = 0.05  # of a GPU: communicators, libraries, fragmentation


def planned_length(seq_length: int) -> int:
    return aligned(seq_length, ALIGNMENT)


class FilePolicies:
    """Makes the stages and policies of the model that a cost file is of.

    num_layers: of the model, if not the file's: static bytes are then scaled by parameters that
    the shape lets one estimate. megatron_mlp: the MLP is Megatron's own whatever the plan says, as
    a mixture of experts is; experts_shared: replicas run them together, whose plans may differ, so
    that no MLP may run again on some of them alone; both as the file tells where they are None.
    host_bytes: a rank's host memory for +offload, where the settings do not say; None without
    limit. wide_bytes_per_second: as Packed has it.
    """

    def __init__(
        self,
        settings: Settings,
        costs: Costs,
        budget_bytes: int,
        *,
        num_layers: int | None = None,
        megatron_mlp: bool | None = None,
        experts_shared: bool | None = None,
        host_bytes: int | None = None,
        wide_bytes_per_second: float = math.inf,
    ):
        self.settings, self.costs, self.budget_bytes = settings, costs, budget_bytes
        self.model = costs.file.require_model()
        packed = self.model.packed
        if packed is not None:
            packed = dataclasses.replace(packed, wide_bytes_per_second=wide_bytes_per_second)
            self.model = self.model.with_rows(packed)
        description = costs.file.table.description
        shape = description.model
        self.num_layers = num_layers or shape.num_layers
        self.kinds = description.layer_kinds
        beyond = [number for number in settings.layers or {} if number > self.num_layers]
        if beyond:
            raise UserError(
                f"layers: there is no layer {beyond[0]} in a model of {self.num_layers}: give "
                f"1 to {self.num_layers}"
            )
        if self.kinds.others and self.num_layers != shape.num_layers:
            raise UserError(
                f"{costs.file.path} is of {shape.num_layers} layers that differ, which does not "
                f"tell the kinds of {self.num_layers}: profile the model with that many"
            )
        self._found: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}
        whole = parameters(description, shape.num_layers)
        self._depth = parameters(description, self.num_layers) / whole
        if megatron_mlp is None:
            megatron_mlp = bool(description.num_experts)
        if experts_shared is None:
            experts_shared = description.experts_shared
        self._megatron_mlp, self._experts_shared = megatron_mlp, experts_shared
        if settings.host_memory is not None:
            host_bytes = parse_bytes(settings.host_memory)
        self._host_bytes = host_bytes

    def stage(
        self,
        *,
        budget: int | None = None,
        share: float = 1.0,
        static_bytes: int | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
        num_in_flight: int = 1,
        held_besides: float = 0.0,
        waiting_bytes: int | None = None,
    ) -> Stage:
        """share: of the model's parameters. By default the whole model on one stage.

        static_bytes: what the stage holds all the time; None: as the file's grid does, which is
        wrong where other replicas share the optimizer's states. UserError where the file's static
        bytes are fewer than its gather buffer. waiting_bytes: of the gradient of tied embeddings
        that they have at most; None: as the file says.
        """
        table = self.costs.file.table
        description = table.description
        waiting = int(table.constants.waiting_bytes or 0) if has_embedding and has_head else 0
        if static_bytes is None:
            static_bytes = int(self._profiled_bytes * share * self._depth)
        return Stage(
            budget_bytes=self.budget_bytes if budget is None else budget,
            static_bytes=static_bytes,
            buffer_bytes_per_token=self._gather_bytes_per_token,
            buffer_free_above=self._buffer_free_above(has_head, num_in_flight),
            mlp_free_above=TILE_ROWS * description.p,
            angle_bytes_per_position=self._angle_bytes_per_position,
            has_embedding=has_embedding,
            has_head=has_head,
            input_bytes_per_token=self._input_bytes_per_token,
            host_bytes=self._host_bytes,
            num_in_flight=num_in_flight,
            held_besides=held_besides,
            margin=self.settings.memory_margin,
            num_predicting=(description.mtp_num_layers or 0) if has_head else 0,
            waiting_bytes=waiting if waiting_bytes is None else min(waiting, waiting_bytes),
        )

    @property
    def _profiled_bytes(self) -> float:
        """The file's static bytes, less the gather buffer."""
        table = self.costs.file.table
        static_bytes = table.constants.static_bytes
        own_bytes = static_bytes - table.buffer_tokens * self._gather_bytes_per_token
        if own_bytes < 0:
            raise UserError(
                f"{self.costs.file.path}: static_bytes {static_bytes:,.0f} are fewer than "
                f"Megatron's gather buffer of {table.buffer_tokens:,.0f} tokens: "
                "profile into a new file"
            )
        return own_bytes

    @property
    def _angle_bytes_per_position(self) -> int:
        """Of RoPE's table of angles in float32."""
        return 4 * self.costs.file.table.description.rotated_channels

    @property
    def _input_bytes_per_token(self) -> float:
        """Of a rank's share of an activation [s, b, h]."""
        description = self.costs.file.table.description
        return description.model.hidden_size * self._element_bytes / description.p

    @property
    def _gather_bytes_per_token(self) -> int:
        """Of the buffer into which Megatron gathers [s, b, h]: a profile's static bytes have it,
        for the tokens that the table says."""
        description = self.costs.file.table.description
        if description.p == 1:
            return 0
        return description.model.hidden_size * self._element_bytes

    def _buffer_free_above(self, has_head: bool, num_in_flight: int) -> int | None:
        """The tokens of a microbatch above which only megatron_ts gathers into that buffer.

        Megatron's own loss head does too, which runs where all tokens fit into one tile. With
        several microbatches in flight the buffer of another may be there.
        """
        tile = self.settings.head_tile
        if self._megatron_mlp or num_in_flight > 1 or (has_head and tile == OFF):
            return None
        if not has_head:
            return 0
        if tile != AUTO:
            return int(tile)
        description = self.costs.file.table.description
        return automatic_tile(
            h=description.model.hidden_size,
            vocab_shard=description.model.vocab_size // description.p,
            element_bytes=self._element_bytes,
        )

    @property
    def _element_bytes(self) -> int:
        dtype = self.costs.file.table.description.dtype
        if dtype not in ELEMENT_BYTES:
            raise UserError(
                f"{self.costs.file.path}: dtype {dtype!r:.40} is not one of "
                f"{', '.join(ELEMENT_BYTES)}: profile again"
            )
        return ELEMENT_BYTES[dtype]

    def check_room(self, stage: Stage) -> None:
        """UserError where what is always there does not fit, whatever the microbatch.

        What an optimizer's step needs besides is taken to grow with the stage's static bytes.
        """
        optimizer_bytes = self.costs.file.table.constants.optimizer_bytes
        profiled = self._profiled_bytes
        share = stage.static_bytes / profiled if profiled else 0.0
        always = stage.static_bytes + optimizer_bytes * share
        if always > stage.budget_bytes:
            raise UserError(
                f"parameters, gradients and optimizer take {bytes_text(always)} of a memory "
                f"budget of {bytes_text(stage.budget_bytes)}: use more ranks, "
                "--use-distributed-optimizer, or a larger budget"
            )

    def policy(
        self, stage: Stage, *, smooth: bool = True, correct: Correct | None = None
    ) -> CostPolicy:
        """smooth: keep previous plans if the settings say so; correct: the layers' costs."""
        settings = self.settings
        gamma = settings.smoothing if smooth else None
        correct = correct or (lambda costs_of: costs_of)
        source = cost_source(correct(self.model.operation), self.model.offloaded)
        memory = stage_memory(self.model.operation, stage)
        common = {
            "granularity": settings.granularity,
            "allowed": self._allowed,
            "operations": self.kinds.operations,
            "alignment": ALIGNMENT,
            "refuse": settings.over_budget == "refuse",
            "rows": self.rows(correct),
            "runs": limits(self.costs.strategies, self.costs.file.table.description.p),
        }
        if cost_policy_kind(settings) == "optimal":
            return OptimalPolicy(
                self.costs.strategies, source, memory, gain=self.gain, gamma=gamma, **common
            )
        if smooth and gamma is None and "smoothing" not in ablations(settings):
            gamma = DEFAULT_GAMMA
        return self._heuristic(source, memory, common | {"gamma": gamma})

    @property
    def gain(self) -> float:
        """What a plan of several strategies must gain over one of one; 0: anything."""
        if cost_policy_kind(self.settings) != "optimal":
            return 0.0
        return mixing_gain(self.settings.mixing_gain, self.costs.file.table.description.source)

    def rows(self, correct: Correct | None = None) -> RowSource | None:
        """Costs of packed rows; None where the file does not tell them."""
        if self.model.packed is None:
            return None
        return row_source(self.model, correct or (lambda costs_of: costs_of), alignment=ALIGNMENT)

    def _heuristic(self, source, memory, common: dict) -> CostPolicy:
        off = ablations(self.settings)
        return HeuristicPolicy(
            self.costs.strategies,
            source,
            memory,
            capacity=0 if "cache" in off else CostPolicy.capacity,
            planner=HeuristicPlanner(
                prune="prune" not in off,
                short_circuit="short-circuit" not in off,
                mix="mix" not in off,
                early_termination="early-termination" not in off,
            ),
            **common,
        )

    def _with_costs(self, operation: str, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of which the file has costs: where layers differ, not all may run all strategies.

        All where it has none, which says so when they are asked for.
        """
        key = (operation, names)
        if key not in self._found:
            able = [n for n in names if base_name(n) == LOCAL or self.model.has(n, operation)]
            self._found[key] = tuple(able) or names
        return self._found[key]

    def _allowed(self, number: int, operation: str) -> tuple[str, ...]:
        restriction = (self.settings.layers or {}).get(number)
        names = self.costs.default
        if restriction is not None:
            names = getattr(restriction, operation)
        own = self.kinds.operations(number)[HALVES.index(operation)]
        if self.kinds.others:
            names = self._with_costs(own, names)
        description = self.costs.file.table.description
        if operation == MLP and self._experts_shared and description.has_experts(own):
            names = tuple(name for name in names if not recomputes(name))
            if not names:
                raise UserError(
                    f"layer {number} has no MLP without +recompute, and replicas that run experts "
                    "together (--expert-model-parallel-size, global_aux_loss) cannot run theirs "
                    "again by plans of their own: allow another strategy"
                )
        return names
