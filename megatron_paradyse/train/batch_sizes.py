"""The sizes of global batches, and which can run: Megatron finds out as each is reached."""

from __future__ import annotations

import argparse
import math

from megatron.core.num_microbatches_calculator import (
    StepBatchsizeNumMicroBatchesCalculator as Schedule,
)

from megatron_paradyse.data.loader import BatchSizes
from megatron_paradyse.errors import UserError

SCHEDULE = "--step-batch-size-schedule"


def batch_sizes(args: argparse.Namespace) -> BatchSizes:
    """Of the training, as Megatron counts the samples of each iteration."""
    if args.step_batch_size_schedule is not None:
        steps = Schedule._parse_schedule(args.step_batch_size_schedule, args.seq_length)
        return BatchSizes(tuple(steps))
    at_once = args.micro_batch_size * args.data_parallel_size
    return BatchSizes.constant(args.global_batch_size // at_once * at_once)


def group_size(args: argparse.Namespace) -> int:
    """Samples of alike lengths in a row, of which every global batch takes whole groups."""
    return math.gcd(*batch_sizes(args).sizes)


def check_schedule_of_sizes(args: argparse.Namespace) -> None:
    """Before Megatron validates them; UserError for a schedule that cannot be followed."""
    if args.rampup_batch_size is not None:
        raise UserError(
            f"--rampup-batch-size {' '.join(map(str, args.rampup_batch_size))}: Megatron 0.19 does "
            f"not read it: leave it out, or give {SCHEDULE}"
        )
    if args.step_batch_size_schedule is None:
        return
    given = f"{SCHEDULE} {args.step_batch_size_schedule!r}"
    if args.decrease_batch_size_if_needed:
        raise UserError(
            f"{given} with --decrease-batch-size-if-needed, which Megatron does not run together: "
            "drop one"
        )
    try:
        of_one = Schedule(1, 1, False, 1, args.step_batch_size_schedule, args.seq_length)
    except (AssertionError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"{given}: {error}: give TOKENS:SIZE from 0 tokens on, such as '0:16 1B:32'"
        ) from error
    sizes = [size for _, size in of_one.schedule]
    if sizes != sorted(sizes):
        raise UserError(f"{given}: Megatron ends where a size is below the last: let them grow")


def check_one_size(args: argparse.Namespace) -> None:
    """Once Megatron has validated them; UserError where a batch of one size does not come out."""
    if args.step_batch_size_schedule is None and not args.skip_train:
        _check(args, "--global-batch-size", args.global_batch_size, args.micro_batch_size)
        if args.train_samples and args.train_samples < args.global_batch_size:
            raise UserError(
                f"--train-samples {args.train_samples} trains nothing, as a global batch has "
                f"{args.global_batch_size}: give that many or more, or --skip-train"
            )
    if args.eval_iters:
        size = args.eval_global_batch_size
        _check(args, "--eval-global-batch-size", size, args.eval_micro_batch_size)


def check_sizes_ahead(args: argparse.Namespace) -> None:
    """Once a checkpoint is loaded; UserError where a size of the schedule does not come out.

    Only sizes that are still to come: those that are past may have run on fewer replicas.
    """
    if args.step_batch_size_schedule is None or args.skip_train:
        return
    schedule = batch_sizes(args).steps
    for i, (_, size) in enumerate(schedule):
        if i + 1 == len(schedule) or schedule[i + 1][0] > args.consumed_train_samples:
            _check(args, SCHEDULE, size, args.micro_batch_size)


def _check(args: argparse.Namespace, flag: str, size: int, micro_batch_size: int) -> None:
    """A global batch of `size` samples, in microbatches for every replica and pipeline stage.

    Packed, there are as many at most, which Megatron must be able to run: documents may fit nowhere
    but alone.
    """
    replicas, stages = args.data_parallel_size, args.pipeline_model_parallel_size
    at_once = micro_batch_size * replicas
    if size < at_once or (size % at_once and not args.decrease_batch_size_if_needed):
        raise UserError(
            f"{flag}: {size} samples do not divide into microbatches of {micro_batch_size} on each "
            f"of {replicas} replicas: give a multiple of {at_once}"
        )
    interleaved = (args.virtual_pipeline_model_parallel_size or 1) > 1
    if not interleaved:
        return
    group = args.microbatch_group_size_per_vp_stage or stages
    count = size // at_once
    if count < group or 0 < count % group < stages:
        raise UserError(
            f"{flag}: {size} samples are {count} microbatches a replica, and interleaved pipeline "
            f"stages take {group} at a time: give a multiple of {group * at_once}"
        )
