"""stand_in_driver OUTPUT NETWORK P STRATEGIES LENGTH <Megatron flags>: a stand-in's cost file."""

from __future__ import annotations

import sys

from megatron_paradyse.profiler.flags import megatron_flags
from megatron_paradyse.simulator.models import GROUP_FLAGS
from megatron_paradyse.simulator.network import find_network
from megatron_paradyse.simulator.stand_in import Options, stand_in_profile


def main() -> None:
    output, network, p, strategies, length = sys.argv[1:6]
    flags = megatron_flags([*sys.argv[6:], *GROUP_FLAGS], model_path=None, ranks=int(p))
    options = Options(
        output=output,
        network=find_network(network, int(p)),
        strategies=tuple(strategies.split(",")),
        lengths=(int(length),),
        seconds_per_point=0.01,
    )
    stand_in_profile(options, flags, lambda event: None)
