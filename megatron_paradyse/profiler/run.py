"""One rank's profile: every point in turn, each saved when it is done."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_paradyse.costs.description import Description
from megatron_paradyse.costs.fitting import MIN_LENGTHS
from megatron_paradyse.costs.rows import RowMeasurement
from megatron_paradyse.costs.table import BYTES_ONLY, Measurement, edges_of
from megatron_paradyse.errors import UserError
from megatron_paradyse.profiler.points import (
    Options,
    Point,
    choose_lengths,
    like_it,
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
    from megatron_paradyse.train.model_layers import count_layers

    start = time.monotonic()
    args = parse_and_validate_args()
    lengths = choose_lengths(options, args.seq_length, p=args.tensor_model_parallel_size)
    strategies = strategies_to_profile(options.strategies)
    initialize(args)
    agreement = make_agreement(options.agree_seconds)
    output = Path(options.output)
    num_layers = count_layers(args)
    journal = Journal(output, describe(args, num_layers))
    _check_same(output, agreement.everyone(len(journal)))
    torch.distributed.barrier()
    for warning in journal.warnings():
        report({"text": warning})
    meter = make_meter()
    report({"text": "building the model"})
    model, constants = build_and_measure(
        num_layers, meter, longest_tokens=max(lengths) * max(options.batch_sizes)
    )
    rate = host_bytes_per_second()
    journal.complete(dataclasses.replace(constants, host_bytes_per_second=rate))
    note = agreement.first(take_note(output) if _is_first() else None)
    if note is not None:
        key, status = note
        failed = point_of_key(key, journal.description) or Point(*key)
        journal.record(empty_measurement(failed, status))
    gc.collect()
    gc.freeze()  # what is there now stays: no later collection need look at it
    todo = _to_measure(options, lengths, strategies, journal.description)
    runner = Runner(model, meter, journal, agreement, options)
    switches = {name: model.switches(name) for name in {point.operation for point in todo}}
    walk = Walk(runner, journal, switches, strategies, timed_in_rounds=not options.quick)

    def is_late() -> bool:
        late = options.budget_seconds and time.monotonic() - start > options.budget_seconds
        return bool(options.budget_seconds and agreement.first(bool(late)))

    fewest = _fewest(todo) if options.quick else 0
    total = sum(point.weight for point in todo)
    done = 0.0
    for number, point in enumerate(todo, 1):
        if number > fewest and is_late():
            report({"text": f"budget of {options.budget_seconds:g} s spent; run again to go on"})
            break
        measurement, resumed = walk.measure(point)
        done += point.weight
        where = {"number": number, "count": len(todo), "share": done / total, "resumed": resumed}
        told = {"seq_length": point.seq_length, "operation": point.operation, "batch_size": 1}
        report({**where, **told, **dataclasses.asdict(measurement)})
    walk.end()


class Walk:
    """Point after point, each in the journal when it is done; the first rank saves it.

    switches: of an operation, whether strategies run it differently; else the first stands for
    all. So does the first of those that share an MLP. timed_in_rounds: points are timed again
    beside those that come after them.
    """

    def __init__(
        self,
        runner: Any,
        journal: Any,
        switches: dict[str, bool],
        strategies: Sequence[str],
        *,
        timed_in_rounds: bool,
    ):
        self._runner, self._journal = runner, journal
        self._switches, self._strategies = switches, strategies
        self._timed_in_rounds = timed_in_rounds
        self._rounds = Rounds(runner.seconds_again)

    def measure(self, point: Point | RowPoint) -> tuple[Measurement | RowMeasurement, bool]:
        """What was measured, and whether an earlier run has done it."""
        found = self._journal.found(point)
        if found is not None and not (point.is_timed and found.status == BYTES_ONLY):
            return found, True
        if self._rounds.begins(point):
            self._time_again()
        measurement = self._runner.run(point)
        self._record(measurement)
        if point.is_timed and self._timed_in_rounds:
            self._rounds.add(point, measurement)
        self._save()
        return measurement, False

    def end(self) -> None:
        self._time_again()
        self._save()

    def _time_again(self) -> None:
        for measurement in self._rounds.again():
            self._record(measurement)

    def _record(self, measurement: Measurement | RowMeasurement) -> None:
        self._journal.record(measurement)
        if isinstance(measurement, Measurement):
            switches = self._switches[measurement.operation]
            for one in like_it(measurement, self._strategies, switches=switches):
                self._journal.record(one)

    def _save(self) -> None:
        if _is_first():
            self._journal.save()


def _fewest(todo: Sequence[Point | RowPoint]) -> int:
    """How many of the points, which come by length, can be fitted to."""
    single = [point for point in todo if isinstance(point, Point)]
    lengths = sorted({point.seq_length for point in single if point.is_timed})
    last = lengths[:MIN_LENGTHS][-1]
    smallest = single[0].batch_size  # first come all lengths of that
    return sum(point.batch_size == smallest and point.seq_length <= last for point in single)


def _is_first() -> bool:
    return os.environ["RANK"] == "0"


def _check_same(output: Path, known: list[int]) -> None:
    """UserError unless all ranks know as many points of an earlier run."""
    if len(set(known)) > 1:
        raise UserError(
            f"{output} has {min(known)} points on one machine, {max(known)} on another: put it on "
            "a disk that all of them see, or copy the larger one to all"
        )


def _to_measure(
    options: Options,
    lengths: Mapping[int, bool],
    strategies: Sequence[str],
    description: Description,
) -> list[Point | RowPoint]:
    operations = description.layer_kinds.measured()
    layers = not options.quick
    edges = edges_of(description)
    single = points(
        lengths, options.batch_sizes, strategies, operations, edges=edges, check_layers=layers
    )
    rows = options.packed and description.p > 1
    return [*single, *(row_points(lengths, strategies, description) if rows else ())]


def initialize(args) -> None:
    """Megatron's groups, for a model that is measured and neither loaded nor saved."""
    from megatron.training import training

    from megatron_paradyse.train import plugin

    args.load = args.save = args.pretrained_checkpoint = None
    plugin.watch_and_agree(args)
    training.initialize_megatron()
    args.check_for_nan_in_loss_and_grad = False  # that check wants to run inside train_step


def make_agreement(wait_seconds: float) -> Any:
    """Of all ranks, each by its tensor-parallel and data-parallel groups, and by its experts'."""
    from megatron.core import mpu

    from megatron_paradyse.profiler.agree import Agreement

    groups = (
        mpu.get_tensor_model_parallel_group(),
        mpu.get_data_parallel_group(),
        mpu.get_expert_model_parallel_group(),
        mpu.get_expert_tensor_parallel_group(),
    )
    return Agreement(wait_seconds=wait_seconds, groups=groups)
