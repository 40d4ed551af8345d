"""The policies that choose by cost, for the run that Megatron's arguments describe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training import get_args, print_rank_0

from megatron_paradyse.costs.correction import corrected
from megatron_paradyse.costs.cost_file import CostFile, read_cost_file
from megatron_paradyse.costs.description import check_compatible
from megatron_paradyse.costs.table import ATTENTION, MLP
from megatron_paradyse.errors import UserError
from megatron_paradyse.planner.from_costs import (
    CostsOf,
    Stage,
    cost_source,
    model_seconds,
    stage_memory,
)
from megatron_paradyse.planner.heuristic import HeuristicPlanner
from megatron_paradyse.planner.pipeline import in_flight
from megatron_paradyse.planner.policies import CostPolicy, HeuristicPolicy, OptimalPolicy
from megatron_paradyse.policy import POLICIES, cost_policy_kind
from megatron_paradyse.settings import Settings
from megatron_paradyse.strategies import parse_strategy_name
from megatron_paradyse.train.budget import UNLIMITED, budget_bytes
from megatron_paradyse.train.correcting import OnlineCorrection

# Lengths are planned for as the next multiple of this, so that like ones share a plan.
ALIGNMENT = 64
DEFAULT_GAMMA = 0.05  # smoothing of the heuristic, as in the paper
ABLATIONS = ("prune", "short-circuit", "mix", "early-termination", "cache", "smoothing")


@dataclass(frozen=True)
class Costs:
    """A cost file, and the strategies that plans may name."""

    file: CostFile
    strategies: tuple[str, ...]


def read_costs(settings: Settings) -> Costs:
    """The cost file that the settings name; UserError if it lacks a strategy."""
    check_policy(settings)
    assert settings.cost_model is not None
    file = read_cost_file(settings.cost_model)
    model = file.require_model()
    halves = (set(model.strategies(ATTENTION)), set(model.strategies(MLP)))
    known = [name for name in model.strategies(ATTENTION) if name in halves[1]]
    names = settings.strategies or tuple(known)
    for restriction in (settings.layers or {}).values():
        names += tuple(n for n in restriction.attention + restriction.mlp if n not in names)
    names = tuple(dict.fromkeys(names))
    for name in names:
        parse_strategy_name(name)
        if name not in known:
            raise UserError(
                f"{settings.cost_model} has no costs of {name}: profile it, or choose among "
                f"{', '.join(known)}"
            )
    if not names:
        raise UserError(f"{settings.cost_model} has no strategy with costs of both operations")
    return Costs(file, names)


class CostPolicies:
    """Makes the policy of each transformer block that this rank holds."""

    def __init__(self, settings: Settings, *, trace: Path | None = None):
        """Must be called once Megatron's process groups exist, by all ranks."""
        from megatron_paradyse.train.describe import describe

        self.settings = settings
        self.costs = read_costs(settings)
        self.model = self.costs.file.require_model()
        self.made: list[tuple[Stage, CostPolicy]] = []
        self.online: OnlineCorrection | None = None
        self._costs_of: CostsOf = self.model.operation
        if settings.correction:
            self.online = self._online()
            self._costs_of = corrected(self.model.operation, self.online.correction)
        self._whole: CostPolicy | None = None
        run = describe(get_args().num_layers)
        description = self.costs.file.table.description
        for warning in check_compatible(description, run, accept=settings.accept_costs):
            print_rank_0(f"> paradyse: {warning}")
        self._check_same_file()
        self.budget_bytes = budget_bytes(settings, trace=trace)

    def policy_of(self, block: TransformerBlock, model_chunks: list) -> CostPolicy:
        """The policy of a block of these chunks, with the memory of its pipeline stage."""
        args = get_args()
        share = _share_of_stage(model_chunks)
        stage = self._stage(
            share=share,
            has_embedding=block.pre_process,
            has_head=block.post_process,
            num_in_flight=_num_in_flight(args),
        )
        always = stage.static_bytes + self.costs.file.table.constants.optimizer_bytes * share
        if always > stage.budget_bytes:
            raise UserError(
                f"parameters, gradients and optimizer take {always / 2**30:.2f} GiB of a memory "
                f"budget of {stage.budget_bytes / 2**30:.2f} GiB: use more ranks, "
                "--use-distributed-optimizer, or a larger budget"
            )
        policy = self._policy(stage)
        self.made.append((stage, policy))
        return policy

    def _stage(self, *, budget: int | None = None, share: float = 1.0, **parts) -> Stage:
        """share: of the model's static bytes. By default the whole model on one stage."""
        args, table = get_args(), self.costs.file.table
        sequence_parallel = args.tensor_model_parallel_size > 1
        token_bytes = args.hidden_size * args.params_dtype.itemsize if sequence_parallel else 0
        longest = max(m.seq_length * m.batch_size for m in table.measurements)
        return Stage(
            budget_bytes=self.budget_bytes if budget is None else budget,
            static_bytes=int((table.constants.static_bytes - longest * token_bytes) * share),
            buffer_bytes_per_token=token_bytes,
            margin=self.settings.memory_margin,
            **parts,
        )

    def _policy(self, stage: Stage, *, smooth: bool = True, correct: bool = True) -> CostPolicy:
        """smooth: keep previous plans, correct: by what was measured, if the settings say so."""
        settings = self.settings
        gamma = settings.smoothing if smooth else None
        source = cost_source(self._costs_of if correct else self.model.operation)
        memory = stage_memory(self.model.operation, stage)
        common = {
            "granularity": settings.granularity,
            "allowed": self._allowed,
            "alignment": ALIGNMENT,
            "refuse": settings.over_budget == "refuse",
        }
        if cost_policy_kind(settings) == "optimal":
            return OptimalPolicy(self.costs.strategies, source, memory, gamma=gamma, **common)
        if smooth and gamma is None and "smoothing" not in _ablations(settings):
            gamma = DEFAULT_GAMMA
        return self._heuristic(source, memory, common | {"gamma": gamma})

    def describe(self) -> str:
        """One line: which costs, strategies and budget."""
        budget = "none"
        if self.budget_bytes != UNLIMITED:
            budget = f"{self.budget_bytes / 2**30:.3f} GiB less {self.settings.memory_margin:.0%}"
        description = self.costs.file.table.description
        return (
            f"> paradyse: plans by {self.costs.file.path}, {description.source} on "
            f"{description.hardware.name} ({description.date}); memory budget {budget}; "
            f"strategies {', '.join(self.costs.strategies)}"
        )

    def microbatch_seconds(self, batch_size: int, seq_length: int) -> float:
        """Predicted for the whole model, all pipeline stages together; alike on every rank."""
        if self._whole is None:
            stages = mpu.get_pipeline_model_parallel_world_size()
            stage = self._stage(budget=self.budget_bytes * stages)
            # Never corrected: data are dealt ahead, on every rank alike.
            self._whole = self._policy(stage, smooth=False, correct=False)
        layers = range(1, get_args().num_layers + 1)
        aligned = -(-seq_length // ALIGNMENT) * ALIGNMENT
        seconds = self._whole.outcome(batch_size, aligned, layers).seconds
        return seconds + model_seconds(self.model.operation, self._stage(), aligned, batch_size)

    def _online(self) -> OnlineCorrection:
        def renew() -> None:
            for _, policy in self.made:
                policy.renew()

        return OnlineCorrection(
            self.costs.strategies,
            self.model.operation,
            aligned=lambda s: -(-s // ALIGNMENT) * ALIGNMENT,
            static_bytes=lambda: self.made[0][0].static_bytes,
            margin=self.settings.memory_margin,
            renew=renew,
        )

    def forget(self) -> None:
        """Start smoothing anew, as a restart does."""
        for _, policy in self.made:
            policy.forget()

    def _heuristic(self, source, memory, common: dict) -> CostPolicy:
        off = _ablations(self.settings)
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

    def _allowed(self, number: int, operation: str) -> tuple[str, ...]:
        restriction = (self.settings.layers or {}).get(number)
        if restriction is not None:
            return getattr(restriction, operation)
        return self.settings.strategies or self.costs.strategies

    def _check_same_file(self) -> None:
        """Every rank of the job must have read the same bytes."""
        mine = int(self.costs.file.fingerprint[:15], 16)
        ends = torch.tensor([mine, -mine], device=torch.cuda.current_device())
        torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
        largest, negated = ends.tolist()
        if largest != -negated:
            raise UserError(
                f"{self.settings.cost_model} differs between ranks (here {mine:x}): copy one file "
                "to every machine"
            )


def check_policy(settings: Settings) -> None:
    """UserError for parts that a policy by cost does not have, and for unknown strategies."""
    _ablations(settings)
    for name in settings.strategies or ():
        parse_strategy_name(name)


def _ablations(settings: Settings) -> set[str]:
    """heuristic:no-prune,no-mix -> {"prune", "mix"}; UserError for others."""
    kind, _, argument = settings.policy.partition(":")
    off = {part.strip().removeprefix("no-") for part in argument.split(",") if part.strip()}
    unknown = sorted(off - set(ABLATIONS))
    if kind == "optimal" and argument:
        raise UserError(f"unknown policy {settings.policy!r}: use {POLICIES}")
    if unknown:
        raise UserError(
            f"unknown policy {settings.policy!r}: heuristic takes "
            f"{', '.join(f'no-{name}' for name in ABLATIONS)}"
        )
    return off


def _num_in_flight(args) -> int:
    return in_flight(
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_world_size(),
        get_num_microbatches(),
        num_chunks=args.virtual_pipeline_model_parallel_size or 1,
        group_size=args.microbatch_group_size_per_vp_stage,
    )


def _share_of_stage(model_chunks: list) -> float:
    """This pipeline stage's share of the parameters; the largest of any rank of its group."""
    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return 1.0
    own = sum(parameter.numel() for chunk in model_chunks for parameter in chunk.parameters())
    twice = 0
    for chunk in model_chunks:
        if chunk.share_embeddings_and_output_weights and not chunk.pre_process:
            twice += chunk.shared_embedding_or_output_weight().numel() if chunk.post_process else 0
    counts = torch.tensor([own - twice], device=torch.cuda.current_device())
    torch.distributed.all_reduce(counts, group=mpu.get_pipeline_model_parallel_group())
    return own / int(counts)
