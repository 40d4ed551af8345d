"""A rank of a profile: driver OPTIONS FAULT <Megatron flags>, OPTIONS and events as JSON.

FAULT makes an operation fail: "STRATEGY OPERATION all" on every rank, "... one" on rank 1 alone;
"other disk": rank 1 does not see the output of the others. "other clock": its seconds are longer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    from megatron_paradyse.moments import seconds_between
    from megatron_paradyse.profiler import measure
    from megatron_paradyse.profiler.points import Options
    from megatron_paradyse.profiler.run import profile

    values = json.loads(sys.argv[1])
    for name in ("lengths", "strategies"):
        values[name] = tuple(values[name])
    if sys.argv[2] == "other disk" and os.environ["RANK"] == "1":
        values["output"] += ".there"
    if sys.argv[2] == "other clock" and os.environ["RANK"] == "1":
        measure.seconds_between = lambda *marks: seconds_between(*marks) / 4
    options = Options(**values)
    if len(sys.argv[2].split()) == 3:
        _break(*sys.argv[2].split())
    events: list[dict] = []
    profile(options, sys.argv[3:], events.append)
    if os.environ["RANK"] == "0":
        Path(f"{options.output}.events").write_text(json.dumps(events))


def _break(strategy: str, operation: str, ranks: str) -> None:
    from megatron_paradyse.submodules import SwitchableLayer

    run_half = SwitchableLayer.run_half

    def broken(self, half, hidden, kwargs):
        planned = getattr(kwargs["packed_seq_params"].plan[self.layer_number], half)
        if half == operation and planned == strategy:
            if ranks == "all":
                raise RuntimeError("no kernel for this")
            if os.environ["RANK"] == "1":
                raise MemoryError
        return run_half(self, half, hidden, kwargs)

    SwitchableLayer.run_half = broken
