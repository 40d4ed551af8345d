"""One training: its policy, budget, telemetry and log, put into place around Megatron's loop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args, print_rank_0, training

from megatron_paradyse.errors import UserError
from megatron_paradyse.hook import Planned, attach_hooks
from megatron_paradyse.live_bytes import Meter, make_meter
from megatron_paradyse.model_edges import attach_edges
from megatron_paradyse.packing.pack import Costs
from megatron_paradyse.packing.placement import place
from megatron_paradyse.packing.row import Row
from megatron_paradyse.policy import cost_policy_kind, make_policy
from megatron_paradyse.settings import FIXED, PACKED, Settings
from megatron_paradyse.train import bucket_order, checkpoints, random_states, watchdog
from megatron_paradyse.train.batch_sizes import check_sizes_ahead
from megatron_paradyse.train.choosing import CostPolicies
from megatron_paradyse.train.data_files import learns_all
from megatron_paradyse.train.log import IterationLog
from megatron_paradyse.train.loop_counts import loop_counts
from megatron_paradyse.train.memory_record import circumstances
from megatron_paradyse.train.run_record import run_record
from megatron_paradyse.train.static_bytes import static_bytes
from megatron_paradyse.train.summary import Summary
from megatron_paradyse.train.teams import bytes_per_second, make_groups
from megatron_paradyse.train.telemetry import Microbatch, Telemetry
from megatron_paradyse.train.trace import Trace
from megatron_paradyse.units import parse_bytes


class Session:
    """enter() before Megatron's pretrain, leave() after it."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._trace = Trace(settings.trace) if settings.trace else None
        self._meter = _meter(settings)
        self._telemetry = Telemetry()
        self._made: list = []
        self._summary = Summary(self._made)
        self._policies: CostPolicies | None = None

    def _positions_restart(self) -> bool:
        """Whether a sequence may hold several documents, each with positions of its own."""
        args = get_args()
        return self.settings.sequences == PACKED or args.reset_position_ids or args.sft

    def enter(self, config) -> None:
        """Put the hooks and the log into place; config is what pretrain gets."""
        config.model.pre_wrap_hooks += [
            self._attach,
            functools.partial(
                attach_edges,
                head_tile=self.settings.head_tile,
                positions_restart=self._positions_restart(),
                learns_all=learns_all(get_args()),
            ),
        ]
        IterationLog(
            style=self.settings.log,
            telemetry=self._telemetry,
            trace=self._trace,
            summary=self._summary,
            circumstances=self._circumstances,
            peak_by_file=self._peak_by_file,
            after=self._after_iteration,
        ).install()
        self._begin_after_setup()
        checkpoints.install()
        if self.settings.sequences != FIXED:
            random_states.install()
        bucket_order.install()
        dog = watchdog.current()
        if dog is not None:
            dog.doing = self._doing
        if self._meter is not None:
            self._meter.__enter__()

    def leave(self) -> None:
        """Print the summary on the first rank, at once: no other rank's line comes between."""
        if table := "\n".join(self._summary.lines()):
            print_rank_0(table)

    def _doing(self) -> tuple[str, tuple[str, ...]]:
        """For the watchdog: where training is, and the strategies of the current plan."""
        microbatch = self._telemetry.current
        if microbatch is None:
            return "", ()
        planned = microbatch.planned
        names = {name for c in planned.plan.layers.values() for name in (c.attention, c.mlp)}
        where = f"iteration {planned.iteration + 1}, microbatch {planned.microbatch}"
        return where, tuple(names)

    @property
    def microbatch_seconds(self) -> Callable[[int, int], float] | None:
        """Predicted (b, s) -> seconds, by which replicas are balanced if they are to be."""
        return self._predicted_seconds if self.settings.balance else None

    @property
    def packing_costs(self) -> Costs | None:
        """By which documents are packed; None where the policy does not choose by cost."""
        if cost_policy_kind(self.settings) is None:
            return None
        return Costs(self._row_seconds, self._alone_seconds, self._fits_alone)

    def _row_seconds(self, row: Row) -> float | None:
        assert self._policies is not None, "the model is built before the data are read"
        return self._policies.row_seconds(row)

    def _alone_seconds(self, tokens: int) -> float:
        """Of one document: as a row, which is quick to predict, or by the plan of least peak."""
        seconds = self._row_seconds(_row_of_one(tokens))
        if seconds is not None:
            return seconds
        try:
            return self._predicted_seconds(1, tokens)
        except UserError:  # told to refuse: the rank that is to run it says so
            return math.inf

    def _fits_alone(self, tokens: int) -> bool:
        return self._row_seconds(_row_of_one(tokens)) is not None

    def _predicted_seconds(self, batch_size: int, seq_length: int) -> float:
        assert self._policies is not None, "the model is built before the data are read"
        return self._policies.microbatch_seconds(batch_size, seq_length)

    def _peak_by_file(self, planned: Planned) -> int | None:
        return None if self._policies is None else self._policies.peak_by_file(planned)

    def _circumstances(self) -> dict[str, Any]:
        policies = self._policies
        if policies is None:
            return circumstances(self.settings, None)
        shared = policies.budget_bytes if policies.experts_shared else None
        return circumstances(self.settings, policies.name_of_costs, shared_budget_bytes=shared)

    def _after_iteration(self, iteration: int, microbatches: list[Microbatch]) -> None:
        online = self._policies.online if self._policies is not None else None
        if online is None:
            return
        left = (get_args().train_iters or 0) - iteration
        if online.after_iteration(microbatches, left=left) and self._trace is not None:
            self._trace.correction(iteration, online.correction.as_record())

    def _attach(self, model_chunks: list) -> list:
        """Once Megatron has built the model on this rank and its process groups exist."""
        make_groups(self.settings.spread)
        alone = mpu.get_pipeline_model_parallel_world_size() == 1
        self._telemetry.meter = self._meter if alone else None
        attach = functools.partial(
            attach_hooks,
            model_chunks,
            counts=loop_counts,
            observer=self._telemetry,
            verify=self.settings.verify_plans,
        )
        if cost_policy_kind(self.settings) is None:
            policy = make_policy(self.settings)
            return attach(policy_of=lambda block: policy)
        trace = self._trace.path if self._trace else None
        rate = math.inf
        if self.settings.spread > 1:
            rate = bytes_per_second()
            print_rank_0(f"> paradyse: {rate / 1e9:.2f} GB/s a rank between replicas")
        policies = self._policies = CostPolicies(
            self.settings, get_args(), trace=trace, wide_bytes_per_second=rate
        )
        chunks = attach(policy_of=lambda block: policies.policy_of(block, model_chunks))
        self._made.extend(policy for _, policy in policies.made)
        print_rank_0(policies.describe())
        self._forget_at_saves(policies)
        return chunks

    def _begin_after_setup(self) -> None:
        """Once Megatron has made model and optimizer: plan with what they hold, start the trace.

        Without a meter plans go by what the cost file's grid held.
        """
        setup = training.setup_model_and_optimizer

        @functools.wraps(setup)
        def setup_and_begin(*args, **kwargs):
            try:
                chunks, optimizer, scheduler = setup(*args, **kwargs)
            except AssertionError:  # it may be of the next batch, too small for the ranks
                check_sizes_ahead(get_args())
                raise
            check_sizes_ahead(get_args())
            if self._policies is not None and self._meter is not None:
                trains = not get_args().skip_train
                held = static_bytes(chunks, optimizer, self._meter, trains=trains)
                self._policies.hold(held)
            if optimizer is not None:
                training.evaluate = _without_gradients(training.evaluate, optimizer)
            if self._trace is not None:
                self._trace.start(run_record(self.settings, self._policies))
            return chunks, optimizer, scheduler

        training.setup_model_and_optimizer = setup_and_begin

    def _forget_at_saves(self, policies: CostPolicies) -> None:
        """Smoothing begins anew at every checkpoint: a restart from it then plans alike."""
        save = training.save_checkpoint_and_time

        @functools.wraps(save)
        def save_and_forget(*args, **kwargs):
            result = save(*args, **kwargs)
            policies.forget()
            return result

        training.save_checkpoint_and_time = save_and_forget


def _without_gradients(evaluate: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """Where a step makes float32 copies of the gradients, Megatron keeps them until the next."""

    @functools.wraps(evaluate)
    def evaluate_without_gradients(*args, **kwargs):
        optimizer.zero_grad()
        return evaluate(*args, **kwargs)

    return evaluate_without_gradients


def _row_of_one(tokens: int) -> Row:
    return place([tokens], mpu.get_tensor_model_parallel_world_size(), causal=True)


def _meter(settings: Settings) -> Meter | None:
    """On a CPU only with a budget: counting every operation's result takes time."""
    if torch.cuda.is_available():
        return make_meter()
    if settings.memory_budget is None:
        return None
    return make_meter(limit_bytes=parse_bytes(settings.memory_budget))
