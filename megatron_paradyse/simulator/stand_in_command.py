"""What `megatron-paradyse profile --stand-in P` does with its options."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_paradyse.errors import UserError
from megatron_paradyse.profiler.flags import megatron_flags
from megatron_paradyse.profiler.lengths import COUNT, check_lengths, default_lengths
from megatron_paradyse.profiler.points import QUICK_COUNT
from megatron_paradyse.profiler.points import Options as ProfileOptions
from megatron_paradyse.simulator.models import GROUP_FLAGS, check_group
from megatron_paradyse.simulator.network import find_network
from megatron_paradyse.simulator.run import quiet
from megatron_paradyse.simulator.stand_in import Options, stand_in_profile


def profile_stand_in(
    asked: ProfileOptions,
    strategies: tuple[str, ...],
    flags: Sequence[str],
    *,
    ranks: int,
    interconnect: str | None,
    model: str | None,
) -> None:
    """Profile this device as the last of `ranks`, and show how far it is on stderr."""
    if interconnect is None:
        raise UserError(
            "--stand-in needs --interconnect: a name such as nvlink3, or a file of "
            "megatron-paradyse profile network"
        )
    unread = {"--bytes-lengths": asked.bytes_lengths, "--budget-seconds": asked.budget_seconds}
    for name in (name for name, given in unread.items() if given is not None):
        raise UserError(f"{name} with --stand-in, which times every length: leave it out")
    network = find_network(interconnect, ranks)
    megatron = megatron_flags([*flags, *GROUP_FLAGS], model_path=model, ranks=ranks)
    check_group(megatron, ranks)
    options = Options(
        output=asked.output,
        network=network,
        strategies=strategies,
        lengths=_lengths(asked, megatron, p=ranks),
        batch_sizes=asked.batch_sizes,
        memory_bytes=asked.memory_bytes,
        seconds_per_point=asked.seconds_per_point,
    )

    def report(event: dict) -> None:
        os.write(2, f"{event['text']}\n".encode())

    with quiet():
        stand_in_profile(options, megatron, report)
    report({"text": f"wrote {asked.output}: one device as rank {ranks - 1} of {ranks}, stand-in"})


def _lengths(asked: ProfileOptions, flags: Sequence[str], *, p: int) -> tuple[int, ...]:
    if asked.lengths:
        return check_lengths(asked.lengths, p=p)
    longest = _sequence_length(flags) if asked.max_length is None else asked.max_length
    return default_lengths(longest, p=p, count=QUICK_COUNT if asked.quick else COUNT)


def _sequence_length(flags: Sequence[str]) -> int:
    for flag, following in zip(flags, [*flags[1:], ""], strict=True):
        name, equals, joined = flag.partition("=")
        value = joined if equals else following
        if name == "--seq-length" and value.isdigit():
            return int(value)
    raise UserError("the longest length is missing: give --max-length, --lengths or --seq-length")
