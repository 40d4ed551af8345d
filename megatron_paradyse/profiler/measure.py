"""Seconds and bytes of one operation on the ranks of a tensor-parallel group."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from megatron.core import mpu

from megatron_paradyse.live_bytes import Meter
from megatron_paradyse.profiler.model import largest_over_ranks
from megatron_paradyse.profiler.operations import Operation, Sink

MAX_REPETITIONS = 15
MIN_TO_DISCARD_FIRST = 4


@dataclass(frozen=True)
class MeasuredBytes:
    """As costs/table.py defines them."""

    kept_bytes: float
    forward_bytes: float
    backward_bytes: float


def measure_bytes(operation: Operation, meter: Meter) -> tuple[MeasuredBytes, tuple[float, float]]:
    """One forward and backward under the meter: bytes and seconds, the largest of any rank.

    The seconds hold those of the meter.
    """
    with meter:
        x = operation.make_input()
        before = meter.live_bytes
        meter.reset_peak()
        marks = [_mark()]
        output, held = operation.forward(x)
        del x  # from here on it lives only if the operation keeps it
        marks.append(_mark())
        forward_peak = meter.peak_bytes
        after = meter.live_bytes
        scalar = Sink.apply(output)
        del output
        meter.reset_peak()
        scalar.backward()
        marks.append(_mark())
        backward_peak = meter.peak_bytes
        del scalar, held
    measured = [after - before, forward_peak - after, backward_peak - after]
    seconds = [_seconds(*marks[:2]), _seconds(*marks[1:])]
    largest = [max(0.0, value) for value in largest_over_ranks([*measured, *seconds])]
    return MeasuredBytes(*largest[:3]), (largest[3], largest[4])


def measure_seconds(operation: Operation, *, bound_seconds: float) -> tuple[float, float]:
    """Forward and backward seconds: the median over repetitions of the slowest rank's.

    Call it when the operation has run before. Repeats for bound_seconds, at least once and at most
    MAX_REPETITIONS times; all ranks alike. Ranks are not held together between repetitions, as
    they are not between the layers of an iteration.
    """
    torch.distributed.barrier(group=mpu.get_tensor_model_parallel_group())
    seconds = [_timed(operation)]
    once = largest_over_ranks([sum(seconds[0])])[0]
    repetitions = min(MAX_REPETITIONS, int(bound_seconds / once))
    if repetitions >= MIN_TO_DISCARD_FIRST:
        seconds.clear()
    seconds += [_timed(operation) for _ in range(repetitions - len(seconds))]
    return _medians(seconds)


def seconds_of_runs(operation: Operation, num_runs: int) -> tuple[float, float]:
    """As measure_seconds, of so many runs after one that does not count."""
    _timed(operation)
    return _medians([_timed(operation) for _ in range(num_runs)])


def _medians(seconds: list[tuple[float, float]]) -> tuple[float, float]:
    """Of forward and of backward, over the repetitions, each the slowest rank's."""
    slowest = largest_over_ranks([value for pair in seconds for value in pair])
    return statistics.median(slowest[::2]), statistics.median(slowest[1::2])


def _timed(operation: Operation) -> tuple[float, float]:
    x = operation.make_input()
    marks = [_mark()]
    output, held = operation.forward(x)
    del x
    marks.append(_mark())
    scalar = Sink.apply(output)
    del output
    scalar.backward()
    del scalar, held
    marks.append(_mark())
    return _seconds(marks[0], marks[1]), _seconds(marks[1], marks[2])


def _mark():
    """A moment: on a GPU of its stream, so that the host may run ahead as in training."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start, end) -> float:
    if not torch.cuda.is_available():
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3
