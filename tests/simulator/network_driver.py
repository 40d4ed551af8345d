"""network_driver OUTPUT: one rank of a measurement of the network."""

from __future__ import annotations

import sys

from megatron_paradyse.simulator import measure_network


def main() -> None:
    measure_network.SECONDS_PER_SIZE = 0.01
    measure_network.LARGEST_ON_CPU = 1 << 16
    measure_network.measure_network(sys.argv[1])
