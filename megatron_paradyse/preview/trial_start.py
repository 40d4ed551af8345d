"""Starts Megatron for trials: as a rank among others, or alone in the place of all."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_paradyse.errors import UserError
from megatron_paradyse.preview.setup import Setup

AGREE_SECONDS = 600.0  # a rank may wait so long for others that still run


class _Alone:
    """An Agreement with nobody."""

    def status(self, mine: str) -> str:
        return mine

    def first(self, value: Any) -> Any:
        return value


def start_rank(flags: Sequence[str]) -> Any:
    """Megatron, by its flags, on a rank of a launcher; how its ranks agree."""
    sys.argv = ["max-length", *flags]
    from megatron.training.arguments import parse_and_validate_args

    from megatron_paradyse.profiler.run import initialize, make_agreement

    initialize(parse_and_validate_args())
    return make_agreement(AGREE_SECONDS)


def start_alone(setup: Setup, flags: Sequence[str], stack: contextlib.ExitStack) -> Any:
    """Megatron in this process alone; until `stack` ends, its network has no other ranks."""
    from megatron_paradyse.simulator.even_experts import even_experts
    from megatron_paradyse.simulator.network import free_network
    from megatron_paradyse.simulator.simulated_rank import start_megatron
    from megatron_paradyse.simulator.traffic import NoClock, fill_with_own, replaced

    p = setup.description.p
    start_megatron(flags, world=setup.description.ranks, rank=0)  # the rank that reads the data
    stack.enter_context(even_experts())
    stack.enter_context(replaced(free_network(p), NoClock(), fill=fill_with_own))
    return _Alone()


def check_model(setup: Setup) -> None:
    """UserError unless the flags describe the model and the ranks that the costs are of."""
    from megatron.training import get_args

    from megatron_paradyse.costs.description import OF_MODEL, OTHER_LAYERS, differences
    from megatron_paradyse.train.describe import describe

    ours = describe(get_args(), setup.policies.num_layers)
    d = setup.description
    model = replace(d.model, num_layers=setup.policies.num_layers)
    told = {name: getattr(d, name) for name in ("attention_mask", *OF_MODEL, OTHER_LAYERS)}
    theirs = replace(ours, model=model, p=d.p, dtype=d.dtype, **told)
    found = differences(theirs, ours)
    if found:
        raise UserError(
            f"the costs are of another model than these flags ({'; '.join(found)}): give the "
            "flags that the costs were made with"
        )
