"""Writes simulated cost files, in a process that has Megatron imported: driver OPTIONS.

OPTIONS is JSON: output, p, lengths, strategies, flags; and what else simulate() takes.
others: of strategies of other packages, the values of their entry points by name.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint
from typing import Any

from megatron_paradyse import strategies
from megatron_paradyse.costs.cost_file import write_cost_file
from megatron_paradyse.simulator import short_loops
from megatron_paradyse.simulator.hardware import find_device
from megatron_paradyse.simulator.models import model_flags
from megatron_paradyse.simulator.network import find_network
from megatron_paradyse.simulator.run import Options, simulate
from megatron_paradyse.strategies import sizes


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    if given.pop("whole_loops", False):
        short_loops.WHOLE = 1 << 20
    group, others = strategies.ENTRY_POINT_GROUP, given.pop("others", {})
    points = {name: EntryPoint(name, value, group) for name, value in others.items()}
    strategies._third_party = lambda: points
    sizes.TILE_ROWS = given.pop("tile_rows", sizes.TILE_ROWS)
    output, p = given.pop("output"), given.pop("p")
    flags = model_flags(None, given.pop("flags"), ranks=p, dtype=given.pop("dtype"))
    device = find_device("a100-80g")
    network = find_network(given.pop("interconnect", device.interconnect), p)
    for name in ("lengths", "strategies", "batch_sizes"):
        if name in given:
            given[name] = tuple(given[name])
    options = Options(device=device, network=network, **given)
    write_cost_file(output, simulate(options, flags, lambda line: None))
