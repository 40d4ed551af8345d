"""The seconds of benchmarks/strategies.py on a GPU, simulated: the same layer as the same rank.

There one device stood in for a rank: communication moved nothing, and what would have been received
was filled with the rank's own values. So it is here: those copies are kernels too.

    python -m benchmarks.simulated_stand_in RECORD GPU OUTPUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.strategies_rank import make_layer
from megatron_paradyse.doors import opened
from megatron_paradyse.simulator.clock import Clock
from megatron_paradyse.simulator.flash_kernel import flash_kernel
from megatron_paradyse.simulator.hardware import Device, find_device
from megatron_paradyse.simulator.network import free_network
from megatron_paradyse.simulator.simulated_device import SimulatedDevice
from megatron_paradyse.simulator.simulated_rank import without_values
from megatron_paradyse.simulator.traffic import Traffic, fill_with_own, strategy_doors
from megatron_paradyse.strategies import get_strategy


class FillingClock(Clock):
    """Of communication that fills what it would have received."""

    def begin(self, seconds: float, prepare: Callable[[], None] | None = None) -> float:
        if prepare is not None:
            prepare()
        return super().begin(seconds)


def simulated_rows(record: dict, device: Device) -> list[dict]:
    """The record's timed rows, each with "simulated_seconds"."""
    (p,) = record["configuration"]["ranks"]
    ((_, sizes, _),) = record["configuration"]["grid"]
    dist.init_process_group("fake", store=FakeStore(), rank=p - 1, world_size=p)
    group = dist.new_group(list(range(p)))
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    simulated = SimulatedDevice(device)
    # No library is called to communicate.
    simulated.clock = FillingClock(device.host_seconds_per_kernel, 0.0)
    traffic = Traffic(free_network(p), simulated.clock, fill_with_own)
    rows = []
    with without_values(), opened(strategy_doors(traffic)), flash_kernel(simulated.scores):
        for row in record["rows"]:
            if "seconds" not in row:
                continue
            with simulated:
                layer = make_layer(s=row["s"], p=p, **sizes, device="cpu", dtype=torch.bfloat16)
                simulated.clock.restart()
                layer.step(get_strategy(row["strategy"]), group)
            rows.append(row | {"simulated_seconds": simulated.clock.reading()})
    return rows


def main() -> None:
    record, gpu, output = sys.argv[1:]
    rows = simulated_rows(json.loads(Path(record).read_text()), find_device(gpu))
    Path(output).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
