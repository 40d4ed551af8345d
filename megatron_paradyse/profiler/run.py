"""One rank's profile: every point in turn, each saved when it is done."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_paradyse.costs.table import (
    EMBEDDING,
    HEAD,
    LAYER,
    LAYER_OPERATIONS,
    MODEL,
    OK,
    OOM,
    Measurement,
)
from megatron_paradyse.strategies import RECOMPUTE, parse_strategy_name, strategy_names

SECONDS_PER_POINT = 0.2
LONG_ENOUGH_SECONDS = 1.5  # the meter's own time, below 0.1 ms per kernel, then no longer counts

Report = Callable[[dict], None]


@dataclass(frozen=True)
class Options:
    """What the user asked for; None means the default that profiling finds."""

    output: str
    lengths: tuple[int, ...] | None = None
    max_length: int | None = None
    batch_sizes: tuple[int, ...] = (1,)
    strategies: tuple[str, ...] | None = None
    budget_seconds: float | None = None
    memory_bytes: int | None = None
    seconds_per_point: float = SECONDS_PER_POINT
    agree_seconds: float = 120.0


@dataclass(frozen=True)
class Point:
    strategy: str
    operation: str
    seq_length: int
    batch_size: int

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.strategy, self.operation, self.seq_length, self.batch_size

    @property
    def weight(self) -> float:
        """Roughly in proportion to its seconds, for the time left."""
        return self.batch_size * self.seq_length * (1 + self.seq_length / 8192) + 1024


def points(
    lengths: Sequence[int], batch_sizes: Sequence[int], strategies: Sequence[str]
) -> Iterator[Point]:
    """Short ones first, so that longer ones can be foreseen.

    The layer as a whole is a check, at every other length: it follows from its halves, under
    +recompute too (costs/recomputed.py).
    """
    for b in batch_sizes:
        for index, s in enumerate(lengths):
            yield Point(MODEL, EMBEDDING, s, b)
            yield Point(MODEL, HEAD, s, b)
            for strategy in strategies:
                for operation in LAYER_OPERATIONS:
                    if operation != LAYER or index % 2 == 0:
                        yield Point(strategy, operation, s, b)


def strategies_to_profile(names: Sequence[str] | None) -> tuple[str, ...]:
    """The named strategies; without names all, each with and without +recompute."""
    if names is None:
        return tuple(name for base in strategy_names() for name in (base, base + RECOMPUTE))
    for name in names:
        parse_strategy_name(name)
    return tuple(dict.fromkeys(names))


def profile(options: Options, flags: Sequence[str], report: Report) -> None:
    """Measure on this rank what the options ask for; rank 0 reports and writes options.output."""
    from megatron_paradyse.train import plugin

    plugin.install()
    sys.argv = ["profile", *flags]
    from megatron.training import training
    from megatron.training.arguments import parse_and_validate_args

    from megatron_paradyse.live_bytes import make_meter
    from megatron_paradyse.profiler.agree import Agreement, take_note
    from megatron_paradyse.profiler.journal import Journal
    from megatron_paradyse.profiler.lengths import check_lengths, default_lengths
    from megatron_paradyse.profiler.model import build_and_measure
    from megatron_paradyse.train.describe import describe

    start = time.monotonic()
    args = parse_and_validate_args()
    p, num_layers = args.tensor_model_parallel_size, args.num_layers
    longest = options.max_length or args.seq_length
    if options.lengths:
        lengths = check_lengths(options.lengths, p=p)
    else:
        lengths = default_lengths(longest, p=p)
    strategies = strategies_to_profile(options.strategies)
    training.initialize_megatron()
    args.check_for_nan_in_loss_and_grad = False  # that check wants to run inside train_step
    agreement = Agreement(wait_seconds=options.agree_seconds)
    output = Path(options.output)
    rank = int(os.environ["RANK"])
    journal = Journal(output, describe(num_layers))
    torch_barrier()
    meter = make_meter()
    report({"text": "building the model"})
    model, constants = build_and_measure(
        num_layers, meter, longest_tokens=max(lengths) * max(options.batch_sizes)
    )
    if journal.constants is None:
        journal.constants = constants
    note = agreement.first(take_note(output) if rank == 0 else None)
    if note is not None:
        (strategy, operation, s, b), status = note
        journal.add(Measurement(strategy, operation, s, b, status))
    runner = Runner(model, meter, journal, agreement, options)
    todo = list(points(lengths, options.batch_sizes, strategies))
    total = sum(point.weight for point in todo)
    done = 0.0
    for number, point in enumerate(todo, 1):
        late = options.budget_seconds and time.monotonic() - start > options.budget_seconds
        if agreement.first(bool(late)):
            report({"text": f"budget of {options.budget_seconds:g} s spent; run again to go on"})
            break
        measurement = journal.get(point.key)
        resumed = measurement is not None
        if measurement is None:
            measurement = runner.run(point)
            journal.add(measurement)
            if rank == 0:
                journal.save()
        done += point.weight
        report(
            {
                "number": number,
                "count": len(todo),
                "share": done / total,
                "resumed": resumed,
                **dataclasses.asdict(measurement),
            }
        )
    if rank == 0:
        journal.save()


def torch_barrier() -> None:
    import torch

    torch.distributed.barrier()


class Runner:
    """Measures points, one after another, and says what became of each."""

    def __init__(self, model, meter, journal, agreement, options: Options):
        self._model, self._meter = model, meter
        self._journal, self._agreement, self._options = journal, agreement, options
        self._operations: Any = None
        self._at: tuple[int, int] | None = None
        hardware = journal.description.hardware
        self._budget_bytes = options.memory_bytes or hardware.memory_bytes

    def run(self, point: Point) -> Measurement:
        """The point's measurement, alike on every rank."""
        from megatron_paradyse.profiler.agree import (
            RESTART_CODE,
            OneRankFailedError,
            leave_note,
            status_of,
        )

        empty = Measurement(*point.key, status=OOM)
        measured = empty
        try:
            status = self._agreement.status(self._foreseen(point))
            if status == OK:
                try:
                    measured = self._measured(point)
                    status = measured.status
                except Exception as error:
                    status = status_of(error)
                    error.__traceback__ = None  # its frames hold tensors
                    self._forget()
                status = self._agreement.status(status)
        except OneRankFailedError as error:
            leave_note(Path(self._options.output), point.key, str(error))
            sys.stderr.write(f"one rank failed alone at {point.key}: {error}\n")
            sys.stderr.flush()
            os._exit(RESTART_CODE)
        if status == OK:
            return measured
        return dataclasses.replace(empty, status=status)

    def _foreseen(self, point: Point) -> str:
        """What can be known before it runs: a shape that cannot, a length that would not fit."""
        from megatron_paradyse.errors import UserError
        from megatron_paradyse.profiler.agree import status_of
        from megatron_paradyse.profiler.lengths import expected_bytes
        from megatron_paradyse.profiler.operations import tensor_parallel_size
        from megatron_paradyse.shapes import attention_shape
        from megatron_paradyse.strategies import get_strategy

        if point.strategy != MODEL:
            shape = attention_shape(self._model.layer.self_attention, training=True)
            try:
                get_strategy(point.strategy).check(shape, tensor_parallel_size())
            except UserError as error:
                return status_of(error)
        others = self._journal.of(point.strategy, point.operation, point.batch_size)
        if any(m.status == OOM and m.seq_length < point.seq_length for m in others):
            return OOM
        expected = expected_bytes(others, point.seq_length)
        if expected is not None and self._meter.live_bytes + expected > self._budget_bytes:
            return OOM
        return OK

    def _measured(self, point: Point) -> Measurement:
        from megatron_paradyse.profiler.measure import measure_bytes, measure_seconds
        from megatron_paradyse.profiler.operations import Operations

        at = (point.seq_length, point.batch_size)
        if self._at != at:
            self._forget()
            with self._meter:
                self._operations = Operations(self._model, *at)
            self._at = at
        operation = self._operations.get(point.operation, point.strategy)
        found, found_seconds = measure_bytes(operation, self._meter)
        peak = found.kept_bytes + max(found.forward_bytes, found.backward_bytes)
        if self._meter.live_bytes + peak > self._budget_bytes:  # a CPU only emulates its budget
            return Measurement(*point.key, status=OOM)
        forward, backward = found_seconds
        if forward + backward < LONG_ENOUGH_SECONDS:
            forward, backward = measure_seconds(
                operation, bound_seconds=self._options.seconds_per_point
            )
        return Measurement(
            *point.key,
            forward_seconds=forward,
            backward_seconds=backward,
            **dataclasses.asdict(found),
        )

    def _forget(self) -> None:
        """Drop the tensors of a length, and what a failure may have left in gradients."""
        import torch

        self._operations = self._at = None
        for chunk in self._model.chunks:
            for parameter in chunk.parameters():
                parameter.grad = None
            chunk.zero_grad_buffer()
        gc.collect()
        torch.cuda.empty_cache()
