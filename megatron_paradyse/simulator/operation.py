"""One operation on a device that is not there: its seconds and its bytes."""

from __future__ import annotations

import gc

from megatron_paradyse.costs.table import OperationCosts


def left_out(error: Exception) -> str:
    """Its status. What it ended holds no tensors on: the next would be thought to free them."""
    from megatron_paradyse.profiler.agree import status_of

    status = status_of(error)
    error.__traceback__ = None  # its frames hold them
    gc.collect()
    return status


def simulated_costs(operation, device) -> OperationCosts:
    """One forward and backward, as the profiler's measure_bytes and measure_seconds take them."""
    from megatron_paradyse.profiler.operations import Sink

    clock = device.clock
    with device:
        x = operation.make_input()
        before = device.live_bytes
        device.reset_peak()
        clock.restart()
        output, held = operation.forward(x)
        del x
        forward_seconds, forward_peak = clock.reading(), device.peak_bytes
        after = device.live_bytes
        scalar = Sink.apply(output)
        del output
        device.reset_peak()
        scalar.backward()
        backward_seconds, backward_peak = clock.reading() - forward_seconds, device.peak_bytes
        del scalar, held
    return OperationCosts(
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        kept_bytes=max(0, after - before),
        forward_bytes=max(0, forward_peak - after),
        backward_bytes=max(0, backward_peak - after),
    )
