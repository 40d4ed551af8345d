"""One rank's profile: every point in turn, each saved when it is done."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_paradyse.costs.rows import RowMeasurement
from megatron_paradyse.costs.table import BYTES_ONLY, Measurement
from megatron_paradyse.errors import UserError
from megatron_paradyse.profiler.points import (
    Options,
    Point,
    choose_lengths,
    like_first,
    points,
    strategies_to_profile,
)
from megatron_paradyse.profiler.rounds import Rounds
from megatron_paradyse.profiler.row_points import RowPoint, point_of_key, row_points

Report = Callable[[dict], None]


def profile(options: Options, flags: Sequence[str], report: Report) -> None:
    """Measure on this rank what the options ask for; rank 0 reports and writes options.output."""
    from megatron_paradyse import megatron_start
    from megatron_paradyse.train import plugin

    megatron_start.before_cuda()
    plugin.install()
    sys.argv = ["profile", *flags]
    import torch
    from megatron.training.arguments import parse_and_validate_args

    from megatron_paradyse.live_bytes import make_meter
    from megatron_paradyse.profiler.agree import take_note
    from megatron_paradyse.profiler.host_rate import host_bytes_per_second
    from megatron_paradyse.profiler.journal import Journal
    from megatron_paradyse.profiler.model import build_and_measure
    from megatron_paradyse.profiler.runner import Runner, empty_measurement
    from megatron_paradyse.train.describe import describe

    start = time.monotonic()
    args = parse_and_validate_args()
    num_layers = args.num_layers
    p = args.tensor_model_parallel_size
    lengths = choose_lengths(options, args.seq_length, p=p)
    strategies = strategies_to_profile(options.strategies)
    initialize(args)
    agreement = make_agreement(options.agree_seconds)
    output = Path(options.output)
    rank = int(os.environ["RANK"])
    journal = Journal(output, describe(num_layers))
    known = agreement.everyone(len(journal))
    if len(set(known)) > 1:
        raise UserError(
            f"{output} has {min(known)} points on one machine, {max(known)} on another: put it on "
            "a disk that all of them see, or copy the larger one to all"
        )
    torch.distributed.barrier()
    meter = make_meter()
    report({"text": "building the model"})
    longest_tokens = max(lengths) * max(options.batch_sizes)
    model, constants = build_and_measure(num_layers, meter, longest_tokens=longest_tokens)
    rate = host_bytes_per_second()
    journal.complete(dataclasses.replace(constants, host_bytes_per_second=rate))
    note = agreement.first(take_note(output) if rank == 0 else None)
    if note is not None:
        key, status = note
        failed = point_of_key(key, journal.description) or Point(*key)
        journal.record(empty_measurement(failed, status))
    gc.collect()
    gc.freeze()  # what is there now stays: no later collection need look at it
    runner = Runner(model, meter, journal, agreement, options)
    operations = journal.description.layer_kinds.measured()
    check_layers = not options.quick
    single = points(lengths, options.batch_sizes, strategies, operations, check_layers=check_layers)
    todo: list[Point | RowPoint] = [*single]
    if options.packed and p > 1:
        todo += row_points(lengths, strategies, journal.description)
    total = sum(point.weight for point in todo)
    done = 0.0
    rounds = Rounds(runner.seconds_again)

    def record(measurement: Measurement | RowMeasurement) -> None:
        journal.record(measurement)
        if isinstance(measurement, Measurement) and not model.switches(measurement.operation):
            for one in like_first(measurement, strategies):
                journal.record(one)

    def time_again() -> None:
        for measurement in rounds.again():
            record(measurement)

    for number, point in enumerate(todo, 1):
        late = options.budget_seconds and time.monotonic() - start > options.budget_seconds
        if options.budget_seconds and agreement.first(bool(late)):
            report({"text": f"budget of {options.budget_seconds:g} s spent; run again to go on"})
            break
        measurement = journal.found(point)
        resumed = measurement is not None
        if measurement is None or (point.is_timed and measurement.status == BYTES_ONLY):
            resumed = False
            if rounds.begins(point):
                time_again()
            measurement = runner.run(point)
            record(measurement)
            if point.is_timed and not options.quick:
                rounds.add(point, measurement)
            if rank == 0:
                journal.save()
        done += point.weight
        where = {"number": number, "count": len(todo), "share": done / total, "resumed": resumed}
        told = {"seq_length": point.seq_length, "operation": point.operation, "batch_size": 1}
        report({**where, **told, **dataclasses.asdict(measurement)})
    time_again()
    if rank == 0:
        journal.save()


def initialize(args) -> None:
    """Megatron's groups, for a model that is measured and neither loaded nor saved."""
    from megatron.training import training

    from megatron_paradyse.train import plugin

    args.load = args.save = args.pretrained_checkpoint = None
    plugin.watch_and_agree(args)
    training.initialize_megatron()
    args.check_for_nan_in_loss_and_grad = False  # that check wants to run inside train_step


def make_agreement(wait_seconds: float) -> Any:
    """Of all ranks, each by its tensor-parallel and data-parallel groups."""
    from megatron.core import mpu

    from megatron_paradyse.profiler.agree import Agreement

    groups = mpu.get_tensor_model_parallel_group(), mpu.get_data_parallel_group()
    return Agreement(wait_seconds=wait_seconds, groups=groups)
