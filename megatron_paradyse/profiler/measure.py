"""Seconds and bytes of one operation, of all ranks: those of replicas measure the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_paradyse.live_bytes import Meter
from megatron_paradyse.moments import moment, seconds_between
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
        marks = [moment()]
        output, held = operation.forward(x)
        del x  # from here on it lives only if the operation keeps it
        marks.append(moment())
        forward_peak = meter.peak_bytes
        after = meter.live_bytes
        scalar = Sink.apply(output)
        del output
        meter.reset_peak()
        scalar.backward()
        marks.append(moment())
        backward_peak = meter.peak_bytes
        del scalar, held
    measured = [after - before, forward_peak - after, backward_peak - after]
    seconds = [seconds_between(*marks[:2]), seconds_between(*marks[1:])]
    largest = [max(0.0, value) for value in largest_over_ranks([*measured, *seconds])]
    return MeasuredBytes(*largest[:3]), (largest[3], largest[4])


def warm_up(operation: Operation) -> None:
    """Let a first run compile kernels and make the libraries' workspaces: not on a CPU."""
    if torch.cuda.is_available():
        _timed(operation)


def measure_seconds(operation: Operation, *, bound_seconds: float) -> tuple[float, float]:
    """Forward and backward seconds, medians over repetitions.

    Call it when the operation has run before. Repeats for bound_seconds, at least once and at most
    MAX_REPETITIONS times; all ranks alike. Ranks are not held together between repetitions, as
    they are not between the layers of an iteration.
    """
    torch.distributed.barrier()
    seconds = [_timed(operation)]
    once = largest_over_ranks([sum(seconds[0])])[0]
    repetitions = min(MAX_REPETITIONS, int(bound_seconds / once))
    if repetitions >= MIN_TO_DISCARD_FIRST:
        seconds.clear()
    seconds += [_timed(operation) for _ in range(repetitions - len(seconds))]
    return _of_all_ranks(seconds)


def seconds_of_runs(operation: Operation, num_runs: int) -> tuple[float, float]:
    """As measure_seconds, of so many runs after one that does not count."""
    _timed(operation)
    return _of_all_ranks([_timed(operation) for _ in range(num_runs)])


def _of_all_ranks(runs: list[tuple[float, float]]) -> tuple[float, float]:
    """Medians over the runs of forward and backward, each the mean of the ranks.

    In runs that follow each other, collectives keep the ranks in step: who is early waits in the
    next run, and the mean is the time from one end of the slowest rank to its next. The largest
    of any rank would count its lateness in the forward, and again, as others' waiting, in the
    backward. Of a single run it is the largest: there is no next one to wait in.
    """
    if len(runs) == 1:
        forward, backward = largest_over_ranks(runs[0])
        return forward, backward
    device = torch.cuda.current_device()
    seconds = torch.tensor(runs, dtype=torch.float64, device=device)  # [runs, 2]
    torch.distributed.all_reduce(seconds)
    seconds /= torch.distributed.get_world_size()
    forward, backward = seconds.quantile(0.5, dim=0).tolist()
    return forward, backward


def _timed(operation: Operation) -> tuple[float, float]:
    x = operation.make_input()
    marks = [moment()]
    output, held = operation.forward(x)
    del x
    marks.append(moment())
    scalar = Sink.apply(output)
    del output
    scalar.backward()
    del scalar, held
    marks.append(moment())
    return seconds_between(marks[0], marks[1]), seconds_between(marks[1], marks[2])
