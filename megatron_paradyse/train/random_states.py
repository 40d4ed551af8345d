"""Random states of every replica in a checkpoint: dropout goes on as without the restart.

Megatron saves those of the first replica for all, because replicas of equal shapes draw equally
much. Documents differ in length, and so does what their hidden dropout draws.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core import mpu
from megatron.training import checkpointing, get_args

from megatron_paradyse.megatron_start import other_values


def install() -> None:
    """Wrap how Megatron collects random states, and how it reads a checkpoint."""
    checkpointing.get_rng_state = _of_all_replicas(checkpointing.get_rng_state)
    checkpointing._load_base_checkpoint = _with_own(checkpointing._load_base_checkpoint)


def _of_all_replicas(states: Callable[..., Any]) -> Callable[..., Any]:
    """As Megatron does with --data-parallel-random-init: a list that stock runs read as well."""

    @functools.wraps(states)
    def states_of_all(*args: Any, **kwargs: Any) -> Any:
        with other_values(get_args(), data_parallel_random_init=True):
            return states(*args, **kwargs)

    return states_of_all


def _with_own(load: Callable[..., Any]) -> Callable[..., Any]:
    """The states of this replica come first, which Megatron then takes; a new one has the first's.

    With --data-parallel-random-init it looks for those of this replica by itself.
    """

    @functools.wraps(load)
    def load_with_own(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        content = result[0] if isinstance(result[0], dict) else {}
        states, replica = content.get("rng_state"), mpu.get_data_parallel_rank()
        if isinstance(states, list) and not get_args().data_parallel_random_init:
            content["rng_state"] = states[replica : replica + 1] or states
        return result

    return load_with_own
