"""One device in the place of rank r of p: real kernels, real memory, no one to talk to.

Megatron's groups have p ranks and move nothing; communication takes the seconds of a network's
model, beside the kernels where the code lets it. What would have been received is this rank's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_paradyse.costs.table import MODEL, OK, OOM, Measurement, edges_of
from megatron_paradyse.profiler.points import like_it
from megatron_paradyse.simulator.network import Network
from megatron_paradyse.strategies import singles

MAX_REPETITIONS = 15


@dataclass(frozen=True)
class Options:
    """As for a profile of real ranks; memory_bytes None: the device's."""

    output: str
    network: Network
    strategies: tuple[str, ...]
    lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...] = (1,)
    memory_bytes: int | None = None
    seconds_per_point: float = 0.2


def stand_in_profile(
    options: Options, flags: Sequence[str], report: Callable[[dict], None]
) -> None:
    """Profile as the last rank of the network's group, and write options.output."""
    from megatron_paradyse import megatron_start
    from megatron_paradyse.train import plugin

    megatron_start.before_cuda()
    plugin.install()
    from megatron.training import get_args

    from megatron_paradyse.live_bytes import make_meter
    from megatron_paradyse.profiler.host_rate import host_bytes_per_second
    from megatron_paradyse.profiler.journal import Journal
    from megatron_paradyse.profiler.model import build_and_measure
    from megatron_paradyse.simulator.even_experts import even_experts, num_ranks
    from megatron_paradyse.simulator.measured_clock import MeasuredClock
    from megatron_paradyse.simulator.simulated_rank import start_megatron
    from megatron_paradyse.simulator.traffic import fill_with_own, replaced
    from megatron_paradyse.train.describe import describe
    from megatron_paradyse.train.model_layers import count_layers

    p = options.network.p
    start_megatron(flags, world=num_ranks(flags, p), rank=p - 1)
    num_layers = count_layers(get_args())
    described = describe(get_args(), num_layers)
    hardware = dataclasses.replace(described.hardware, num_devices=p)
    if hardware.kind == "cpu":  # describe() shares this machine's memory among the ranks
        hardware = dataclasses.replace(hardware, memory_bytes=hardware.memory_bytes * p)
    description = dataclasses.replace(
        described, source="stand-in", interconnect=options.network.name, hardware=hardware
    )
    journal = Journal(Path(options.output), description)
    for warning in journal.warnings():
        report({"text": warning})
    meter, clock = make_meter(), MeasuredClock()
    with contextlib.ExitStack() as stack:
        stack.enter_context(even_experts())
        stack.enter_context(replaced(options.network, clock, fill=fill_with_own))
        report({"text": "building the model"})
        tokens = max(options.lengths) * max(options.batch_sizes)
        model, constants = build_and_measure(num_layers, meter, longest_tokens=tokens)
        rate = host_bytes_per_second()
        journal.complete(dataclasses.replace(constants, host_bytes_per_second=rate))
        stand_in = StandIn(options, model, meter, clock, journal)
        points = [(s, b) for b in options.batch_sizes for s in options.lengths]
        for number, (s, b) in enumerate(points, 1):
            stand_in.measure_all(s, b)
            journal.save()
            report({"text": f"{number}/{len(points)}  s={s} b={b}"})


class StandIn:
    """Measures the operations of one model on this device."""

    def __init__(self, options: Options, model, meter, clock, journal):
        self._options, self._model = options, model
        self._meter, self._clock, self._journal = meter, clock, journal

    def measure_all(self, s: int, b: int) -> None:
        """Every operation of a length that the journal lacks."""
        wanted = [(MODEL, edge) for edge in edges_of(self._journal.description)]
        halves = self._journal.description.layer_kinds.halves()
        wanted += [(name, half) for name in singles(self._options.strategies) for half in halves]
        missing = [key for key in wanted if self._journal.get((*key, s, b)) is None]
        if not missing:
            return
        from megatron_paradyse.profiler.operations import Operations
        from megatron_paradyse.simulator.simulated_rank import read_anywhere

        with self._meter:
            operations = Operations(self._model, s, b, read=read_anywhere)
        for strategy, operation in missing:
            if self._journal.get((strategy, operation, s, b)) is not None:
                continue  # as of another strategy
            point = self._point(operations, strategy, operation)
            self._journal.add(point)
            switches = self._model.switches(operation)
            for one in like_it(point, self._options.strategies, switches=switches):
                self._journal.add(one)

    def _point(self, operations, strategy: str, operation: str) -> Measurement:
        from megatron_paradyse.simulator.operation import left_out
        from megatron_paradyse.strategies import leaving_out

        s, b = operations.size
        try:
            found = self._measured(operations, strategy, operation)
        except (RuntimeError, MemoryError, leaving_out(strategy)) as error:
            return Measurement(strategy, operation, s, b, left_out(error))
        peak = found["kept_bytes"] + max(found["forward_bytes"], found["backward_bytes"])
        budget = self._options.memory_bytes or self._journal.description.hardware.memory_bytes
        if self._meter.live_bytes + peak > budget:
            return Measurement(strategy, operation, s, b, OOM)
        return Measurement(strategy, operation, s, b, OK, **found)

    def _measured(self, operations, name: str, operation: str) -> dict[str, float]:
        """Bytes of the rank that holds most, seconds of the last one measured."""
        from megatron_paradyse.profiler.measure import measure_bytes, warm_up
        from megatron_paradyse.shapes import attention_shape
        from megatron_paradyse.simulator.run import ranks_that_differ
        from megatron_paradyse.simulator.simulated_rank import attention_as_rank
        from megatron_paradyse.strategies import check_takes, get_strategy
        from megatron_paradyse.strategies.contract import Microbatch
        from megatron_paradyse.strategies.sizes import is_narrow

        seq_length, _ = operations.size
        p, narrow = self._options.network.p, False
        if name != MODEL:
            attention = self._model.layer_of(operation).self_attention
            shape = attention_shape(attention, training=True)
            get_strategy(name).check(shape, p)
            check_takes(name, Microbatch(*operations.size), p)
            narrow = is_narrow(shape.window, seq_length, p)
        most: dict[str, float] = {}
        for rank in ranks_that_differ(name, operation, p=p, causal=True, narrow=narrow):
            with attention_as_rank(self._model, rank):
                part = operations.get(operation, name)
                warm_up(part)
                measured, _ = measure_bytes(part, self._meter)
                for key, value in dataclasses.asdict(measured).items():
                    most[key] = max(value, most.get(key, 0.0))
                seconds = self._seconds(part)
        return {**most, "forward_seconds": seconds[0], "backward_seconds": seconds[1]}

    def _seconds(self, operation) -> tuple[float, float]:
        """Medians; repeats for the seconds of a point, at least once."""
        laps = [self._timed(operation)]
        again = int(self._options.seconds_per_point / max(sum(laps[0]), 1e-9))
        laps += [self._timed(operation) for _ in range(min(MAX_REPETITIONS, again) - 1)]
        forward, backward = zip(*laps, strict=True)
        return statistics.median(forward), statistics.median(backward)

    def _timed(self, operation) -> list[float]:
        from megatron_paradyse.profiler.operations import Sink

        x = operation.make_input()
        self._clock.restart()
        output, held = operation.forward(x)
        del x
        self._clock.mark()
        scalar = Sink.apply(output)
        del output
        scalar.backward()
        self._clock.mark()
        del scalar, held
        return self._clock.laps()
