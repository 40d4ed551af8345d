"""The policy that training would make, from the options of the commands."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_paradyse.costs.cost_file import CostFile
from megatron_paradyse.costs.description import Description, Hardware, tile_text
from megatron_paradyse.costs.layers import MAX_LAYERS
from megatron_paradyse.edges.tiles import AUTO, OFF
from megatron_paradyse.errors import UserError
from megatron_paradyse.planner.cost_settings import read_costs
from megatron_paradyse.planner.from_costs import Stage
from megatron_paradyse.planner.from_file import RESERVE_SHARE, FilePolicies
from megatron_paradyse.planner.peak import with_margin
from megatron_paradyse.planner.pipeline import UNLIMITED, held_besides, in_flight, parameters
from megatron_paradyse.planner.policies import CostPolicy
from megatron_paradyse.planner.sources import RowSource
from megatron_paradyse.policy import cost_policy_kind
from megatron_paradyse.settings import Settings, make_settings
from megatron_paradyse.units import parse_bytes


@dataclass(frozen=True)
class Grid:
    """The pipeline that the costs are planned for; stage counts from 1."""

    num_stages: int = 1
    stage: int = 1
    num_microbatches: int | None = None  # default: as many as stages


@dataclass(frozen=True)
class Setup:
    """A policy by cost, without smoothing: what was planned before has no part in it.

    budget: what the budget is and where it comes from, in words. layers: those of the stage.
    static_given: whether what it holds always was said, and not taken from the file.
    """

    policies: FilePolicies
    stage: Stage
    policy: CostPolicy
    layers: tuple[int, ...]
    budget: str
    grid: Grid
    static_given: bool = False

    @property
    def description(self) -> Description:
        return self.policies.costs.file.table.description

    @property
    def limited(self) -> bool:
        return self.stage.budget_bytes < UNLIMITED

    @property
    def rows(self) -> RowSource:
        """What packed rows cost; UserError where the file does not tell it."""
        if self.policy.rows is None:
            raise UserError(f"{self.policies.costs.file.path} tells nothing of packed documents")
        return self.policy.rows

    def with_budget(self, share: float) -> CostPolicy:
        """The same policy with that share of the memory."""
        budget = int(self.stage.budget_bytes * share)
        stage = dataclasses.replace(self.stage, budget_bytes=budget)
        return self.policies.policy(stage, smooth=False)


def make_setup(
    costs: str,
    flags: dict[str, Any],
    config: str | None = None,
    *,
    num_layers: int | None = None,
    static_memory: int | None = None,
    grid: Grid | None = None,
    packed: bool = False,
) -> Setup:
    """flags: values of Settings, None where not given; config: a YAML file of settings.

    static_memory: bytes that the stage holds always; None: as the file's grid does, and of
    another depth or stage by the parameters that the shape lets one estimate. packed: plans of
    packed rows too, which other strategies may run. UserError for a policy that does not choose by
    cost, a file without costs, no room, and of a part of a mixture of experts without
    static_memory.
    """
    grid = grid or Grid()
    settings = _settings(costs, flags, config)
    read = read_costs(settings, packed=packed)
    description = read.file.table.description
    shape = description.model
    num_layers = shape.num_layers if num_layers is None else num_layers
    predicting = description.mtp_num_layers or 0
    if not 1 <= num_layers - predicting <= MAX_LAYERS - predicting:
        more = f", {predicting} of them of multi-token prediction" if predicting else ""
        raise UserError(
            f"a model has {1 + predicting:,} to {MAX_LAYERS:,} layers{more}, got --num-layers "
            f"{num_layers}: give another"
        )
    budget_bytes, budget = _budget(settings, description.hardware)
    given = settings.head_tile != AUTO or flags.get("head_tile") is not None
    settings = _with_tile_of(read.file, settings, given=given)
    experts = bool(description.num_experts)
    part = f"--pipeline-stages {grid.num_stages}" if grid.num_stages > 1 else ""
    part = part or (f"--num-layers {num_layers}" if num_layers != shape.num_layers else "")
    if experts and part and static_memory is None:
        raise UserError(
            f"{part}: {costs} is of a mixture of experts and does not tell how many parameters "
            "these layers have: give --static-memory, as training says it at its start"
        )
    policies = FilePolicies(settings, read, budget_bytes, num_layers=num_layers)
    layers = _layers(num_layers, grid, num_predicting=predicting)
    first, last = grid.stage == 1, grid.stage == grid.num_stages
    own = parameters(description, len(layers), edge=first or last)
    share = own / parameters(description, num_layers) if grid.num_stages > 1 else 1.0
    schedule = grid.stage - 1, grid.num_stages, grid.num_microbatches or grid.num_stages
    stage = policies.stage(
        share=share,
        static_bytes=static_memory,
        has_embedding=first,
        has_head=last,
        num_in_flight=in_flight(*schedule),
        held_besides=held_besides(*schedule),
    )
    policies.check_room(stage)
    policy = policies.policy(stage, smooth=False)
    return Setup(policies, stage, policy, layers, budget, grid, static_memory is not None)


def _settings(costs: str, flags: dict[str, Any], config: str | None) -> Settings:
    settings = make_settings(flags, config, prefix="--")
    if flags.get("policy") is None and cost_policy_kind(settings) is None:
        settings = dataclasses.replace(settings, policy="optimal")  # the file's is for training
    if cost_policy_kind(settings) is None:
        raise UserError(
            f"policy {settings.policy!r} does not choose by cost: give optimal, heuristic, or "
            "heuristic:no-prune,no-mix,..."
        )
    return dataclasses.replace(settings, cost_model=costs)


def _with_tile_of(file: CostFile, settings: Settings, *, given: bool) -> Settings:
    """The settings with the loss head of the costs; UserError where another one was given."""
    d = file.table.description
    if d.head_tile is None:
        return settings
    if given and tile_text(settings.head_tile, d.model, p=d.p, dtype=d.dtype) != d.head_tile:
        raise UserError(
            f"--head-tile {settings.head_tile}: the costs in {file.path} are of head tile "
            f"{d.head_tile}: leave --head-tile out, or profile with --paradyse-head-tile "
            f"{settings.head_tile}"
        )
    return dataclasses.replace(settings, head_tile=OFF if d.head_tile == OFF else int(d.head_tile))


def _budget(settings: Settings, hardware: Hardware) -> tuple[int, str]:
    """Bytes of a rank, and the same in words."""
    if settings.memory_budget is not None:
        budget = parse_bytes(settings.memory_budget)
        if with_margin(budget, settings.memory_margin) <= 0:
            raise UserError(
                f"a memory budget of {settings.memory_budget} holds nothing: give the memory of a "
                "rank, such as 76GiB"
            )
        return budget, "as given"
    if hardware.kind == "cuda":
        reserve = int(RESERVE_SHARE * hardware.memory_bytes)
        total = f"{hardware.memory_bytes / 2**30:.2f} GiB"
        return hardware.memory_bytes - reserve, f"{hardware.name}, {total} less {RESERVE_SHARE:.0%}"
    return UNLIMITED, "none: on a CPU only --memory-budget sets one"


def _layers(num_layers: int, grid: Grid, *, num_predicting: int) -> tuple[int, ...]:
    """Of the stage; those of multi-token prediction are in the last one."""
    if not 1 <= grid.stage <= grid.num_stages:
        raise UserError(
            f"pipeline stage {grid.stage} of {grid.num_stages}: stages are numbered from 1: give "
            f"--pipeline-stage 1 to {grid.num_stages}"
        )
    decoding = num_layers - num_predicting
    if decoding % grid.num_stages:
        raise UserError(
            f"{decoding} layers do not divide into {grid.num_stages} pipeline stages: give a "
            "number of stages that divides them"
        )
    each = decoding // grid.num_stages
    end = num_layers if grid.stage == grid.num_stages else grid.stage * each
    return tuple(range((grid.stage - 1) * each + 1, end + 1))
