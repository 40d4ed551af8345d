"""What Megatron's checks of its results found, in one line: losses that are no numbers, spikes.

Its rerun state machine runs an iteration again whose result it does not believe, first in place,
then from a checkpoint on another device, and ends the job after each.
"""

from __future__ import annotations

import re

from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.training import get_args

FOUND = {
    RerunState.RERUNNING_IN_PLACE: "and another as it ran again on the same device: start again "
    "from the last checkpoint; if one machine does it again, leave that machine out",
    RerunState.WILL_RERUN_FROM_CHECKPOINT: "and the same as it ran again: start again from the "
    "checkpoint that was saved, on other devices, to find out whether this one computes wrongly",
    RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT: "and ran again on the device that had it before: "
    "start again from the same checkpoint, with the ranks on other devices",
    RerunState.RERUNNING_FROM_CHECKPOINT: "and ran again on another device: if Megatron says above "
    "that it came again, start again from an earlier checkpoint with a lower --lr, else without "
    "the machine that had it before",
}


def not_a_number(reason: str, where: str = "at") -> str:
    """What Megatron's check of the losses means; it names the rank in its own lines."""
    found = re.search(r"message='([^']*)'", reason)  # what is before it names each rank itself
    reason = found[1] if found else " ".join(reason.split())[:200]
    return (
        f"the loss is not a number{_or_a_spike()} {where} iteration {_iteration()} ({reason}): "
        "start again from an earlier checkpoint with a lower --lr; if one machine does it again, "
        "leave that machine out"
    )


def ended_by_check(code: int) -> str:
    """Why Megatron's rerun state machine ends the job with this code, and what to do."""
    return (
        f"Megatron's --rerun-mode ends with code {code}: a loss of iteration {_iteration()} was "
        f"not a number{_or_a_spike()}, {FOUND[get_rerun_state_machine().state]}"
    )


def _iteration() -> int:
    return (getattr(get_args(), "curr_iteration", 0) or 0) + 1


def _or_a_spike() -> str:
    return " or a spike" if get_args().check_for_spiky_loss else ""
