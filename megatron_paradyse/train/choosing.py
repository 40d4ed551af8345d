"""The policies that choose by cost, for the run that Megatron's arguments describe."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training import print_rank_0

from megatron_paradyse.costs.correction import corrected
from megatron_paradyse.costs.description import check_compatible
from megatron_paradyse.errors import UserError
from megatron_paradyse.hook import Planned
from megatron_paradyse.packing.row import Row
from megatron_paradyse.planner.cost_settings import read_costs
from megatron_paradyse.planner.from_costs import (
    Correct,
    Stage,
    model_seconds,
    prediction_seconds,
)
from megatron_paradyse.planner.from_file import ALIGNMENT, FilePolicies, planned_length
from megatron_paradyse.planner.pipeline import UNLIMITED, held_besides, in_flight
from megatron_paradyse.planner.policies import CostPolicy
from megatron_paradyse.planner.row_prices import RowPrices
from megatron_paradyse.settings import Settings
from megatron_paradyse.train.batch import device_of_rank
from megatron_paradyse.train.batch_sizes import batch_sizes
from megatron_paradyse.train.budget import budget_bytes, host_bytes
from megatron_paradyse.train.correcting import OnlineCorrection
from megatron_paradyse.train.describe import describe
from megatron_paradyse.train.expert_flags import balance_over_replicas
from megatron_paradyse.train.memory_record import files_to_read, name_of_costs
from megatron_paradyse.train.model_layers import count_layers
from megatron_paradyse.train.static_bytes import largest_by_stage, waiting_gradient_bytes
from megatron_paradyse.units import bytes_text


class CostPolicies:
    """Makes the policy of each transformer block that this rank holds."""

    def __init__(
        self,
        settings: Settings,
        args: argparse.Namespace,
        *,
        trace: Path | None = None,
        wide_bytes_per_second: float = math.inf,
    ):
        """Must be called once Megatron's process groups exist, by all ranks. args: Megatron's."""
        if mpu.get_tensor_model_parallel_rank() != 0:  # all ranks of a group plan alike
            logging.getLogger("megatron_paradyse.planner").setLevel(logging.ERROR)
        self.settings = settings
        self._args = args
        self.wide_bytes_per_second = wide_bytes_per_second
        self.costs = read_costs(settings)
        self.made: list[tuple[Stage, CostPolicy]] = []
        self._whole: CostPolicy | None = None
        self._all_stages_bytes: int | None = None  # None: as the file says
        self._layers: list[tuple[int, ...]] = []  # of each that is made
        self._stages: list[tuple[Stage, tuple[int, ...]]] = []  # of every rank's; none: not known
        self._prices: list[RowPrices] = []
        self._num_layers = count_layers(args)
        run = describe(args, self._num_layers)
        description = self.costs.file.table.description
        warnings = check_compatible(description, run, accept=settings.accept_costs)
        for warning in (*warnings, *self.costs.file.warnings()):
            print_rank_0(f"> paradyse: {warning}")
        self._check_same_file()
        self.budget_bytes = budget_bytes(
            settings, costs=self.name_of_costs, records=files_to_read(args, trace)
        )
        # Whether replicas compute each other's tokens, and whether they wait within layers.
        self.experts_shared = run.experts_shared
        self.together = self.experts_shared or balance_over_replicas(args)
        self._of_file = FilePolicies(
            settings,
            self.costs,
            self.budget_bytes,
            num_layers=self._num_layers,
            megatron_mlp=bool(args.num_experts),
            experts_shared=self.together,
            host_bytes=host_bytes(settings),
            wide_bytes_per_second=wide_bytes_per_second,
        )
        self.online = self._online() if settings.correction else None
        self._correct: Correct | None = None
        if self.online is not None:
            self._correct = functools.partial(corrected, correction=self.online.correction)

    def policy_of(self, block: TransformerBlock, model_chunks: list) -> CostPolicy:
        """The policy of a block of these chunks, with the memory of its pipeline stage."""
        args = self._args
        stage = self._of_file.stage(
            share=_share_of_stage(model_chunks),
            has_embedding=block.pre_process,
            has_head=block.post_process,
            num_in_flight=in_flight(**_schedule(args)),
            held_besides=held_besides(**_schedule(args)),
            waiting_bytes=sum(map(waiting_gradient_bytes, model_chunks)),
        )
        policy = self._of_file.policy(stage, correct=self._correct)
        self.made.append((stage, policy))
        predicting = range(args.num_layers + 1, self._num_layers + 1) if block.post_process else ()
        self._layers.append((*(layer.plan_number for layer in block.layers), *predicting))
        return policy

    def hold(self, static_bytes: int) -> None:
        """Plan with what this rank holds, instead of what the file's grid held.

        static_bytes: see static_bytes.py. All ranks of the job must call it, before anything is
        planned. UserError, alike on all, where a stage has no room for a microbatch beside them.
        """
        by_stage = largest_by_stage(static_bytes)
        own = by_stage[mpu.get_pipeline_model_parallel_rank()]
        self._all_stages_bytes = sum(by_stage)
        sizes = ", ".join(bytes_text(size) for size in by_stage)
        print_rank_0(
            f"> paradyse: parameters, gradients and optimizer hold {sizes} of a rank's memory"
            f"{', by pipeline stage' if len(by_stage) > 1 else ''}"
        )
        fullest = dataclasses.replace(self.made[0][0], static_bytes=max(by_stage))
        self._of_file.check_room(fullest)  # on every stage: none shall wait for one that is refused
        for index, (stage, policy) in enumerate(self.made):
            policy.hold(own)
            self.made[index] = (dataclasses.replace(stage, static_bytes=own), policy)
        self._stages = self._of_all_stages()

    def _of_all_stages(self) -> list[tuple[Stage, tuple[int, ...]]]:
        """Every pipeline stage, or chunk of an interleaved one, and its layers: alike on all ranks.

        One without layers plans nothing.
        """
        made = zip(self.made, self._layers, strict=True)
        own = [(dataclasses.asdict(stage), layers) for (stage, _), layers in made]
        found = _of_all_ranks(own, mpu.get_pipeline_model_parallel_group())
        return [(Stage(**values), tuple(layers)) for values, layers in found if layers]

    def describe(self) -> str:
        """One line: which costs, strategies and budget."""
        budget = "none"
        if self.budget_bytes != UNLIMITED:
            size = self.budget_bytes
            told = f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.1f} MiB"
            budget = f"{told} less {self.settings.memory_margin:.0%}"
        description = self.costs.file.table.description
        return (
            f"> paradyse: plans by {self.costs.file.path}, {description.source} on "
            f"{description.hardware.name} ({description.date}); memory budget {budget}; "
            f"strategies {', '.join(self.costs.strategies)}"
        )

    def microbatch_seconds(self, batch_size: int, seq_length: int) -> float:
        """Predicted for the whole model, all pipeline stages together; alike on every rank."""
        layers = range(1, self._num_layers + 1)
        aligned = planned_length(seq_length)
        seconds = self._whole_policy().outcome(batch_size, aligned, layers).seconds
        return seconds + self._edge_seconds(aligned, batch_size)

    def row_seconds(self, row: Row) -> float | None:
        """Predicted for a packed microbatch and the whole model; alike on every rank.

        By plans that fit, near the best of these; None where one of the stages has none.
        """
        if not self._prices:
            self._prices = self._row_prices()
        load = self._prices[0].load_of(row)
        seconds = [prices.seconds_of(load) for prices in self._prices]
        found = [one for one in seconds if one is not None]
        return sum(found) if len(found) == len(seconds) else None

    def _row_prices(self) -> list[RowPrices]:
        """Of each pipeline stage, within its own memory; the first counts embedding and head."""
        policies = [
            (self._of_file.policy(stage, smooth=False), layers) for stage, layers in self._stages
        ]
        if not policies:
            policies = [(self._whole_policy(), tuple(range(1, self._num_layers + 1)))]
        return [
            RowPrices(
                policy,
                self._of_file.model,
                layers,
                alignment=ALIGNMENT,
                edge_seconds=(lambda s: 0.0) if index else self._edge_seconds,
            )
            for index, (policy, layers) in enumerate(policies)
        ]

    def peak_by_file(self, planned: Planned) -> int | None:
        """Of a microbatch that a policy of this run planned, predicted without corrections.

        A start begins without them. None where the file tells nothing of its plan.
        """
        stage = next(stage for stage, policy in self.made if policy is planned.policy)
        policy = self._of_file.policy(stage, smooth=False)
        shape = (planned.batch_size, planned.seq_length)
        outcome = policy.predict(planned.plan, *shape, row=planned.row)
        return None if outcome is None else outcome.peak_bytes

    def _whole_policy(self) -> CostPolicy:
        """Of all pipeline stages together; never corrected: data are dealt ahead, on all ranks."""
        if self._whole is None:
            stages = mpu.get_pipeline_model_parallel_world_size()
            stage = self._of_file.stage(
                budget=self.budget_bytes * stages, static_bytes=self._all_stages_bytes
            )
            self._whole = self._of_file.policy(stage, smooth=False)
        return self._whole

    def _edge_seconds(self, seq_length: int, batch_size: int = 1) -> float:
        operation = self._of_file.model.operation
        return model_seconds(operation, self._of_file.stage(), seq_length, batch_size)

    def _online(self) -> OnlineCorrection:
        def renew() -> None:
            for _, policy in self.made:
                policy.renew()

        together = None
        if self.together:
            together = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return OnlineCorrection(
            self.costs.strategies,
            self._of_file.model,
            operations=self._of_file.kinds.operations,
            rows=self._of_file.rows(),
            aligned=planned_length,
            static_bytes=lambda: self.made[0][0].static_bytes,
            beside=self._seconds_beside,
            margin=self.settings.memory_margin,
            renew=renew,
            together=together,
            experts_shared=self.experts_shared,
        )

    def _seconds_beside(self, planned: Planned) -> float:
        """Predicted of what is observed with the layers and is none of them."""
        stage = next(stage for stage, policy in self.made if policy is planned.policy)
        s, b = planned_length(planned.seq_length), planned.batch_size
        return prediction_seconds(self._of_file.model.operation, stage, s, b)

    @property
    def name_of_costs(self) -> str:
        """For records of what ran out of memory."""
        assert self.settings.cost_model is not None, "see read_costs"
        return name_of_costs(self.settings.cost_model, self.costs.file.fingerprint)

    def forget(self) -> None:
        """Start smoothing anew, as a restart does."""
        for _, policy in self.made:
            policy.forget()

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


def _schedule(args) -> dict[str, Any]:
    """Of this rank's stage, as planner/pipeline.py counts by it."""
    return {
        "stage": mpu.get_pipeline_model_parallel_rank(),
        "num_stages": mpu.get_pipeline_model_parallel_world_size(),
        "num_microbatches": _most_microbatches(args),
        "num_chunks": args.virtual_pipeline_model_parallel_size or 1,
        "group_size": args.microbatch_group_size_per_vp_stage,
    }


def _most_microbatches(args) -> int:
    """Of an iteration; of the largest where batch sizes grow."""
    at_once = args.micro_batch_size * args.data_parallel_size
    return max(1, max(batch_sizes(args).sizes) // at_once)


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


def _of_all_ranks(own: list, group: torch.distributed.ProcessGroup) -> list:
    """The lists of a group's ranks, one after the other, sent as JSON: nothing is unpickled."""
    content = json.dumps(own).encode()
    longest = torch.tensor([len(content)], device=device_of_rank())
    torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX, group=group)
    padded = bytearray(content.ljust(int(longest)))  # by spaces, which JSON passes over
    mine = torch.frombuffer(padded, dtype=torch.uint8).to(device_of_rank())
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(parts, mine, group=group)
    return [one for part in parts for one in json.loads(bytes(part.tolist()))]
