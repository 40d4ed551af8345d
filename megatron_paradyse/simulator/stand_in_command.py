"""What `megatron-paradyse profile --stand-in P` does with its options."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_paradyse.errors import UserError
from megatron_paradyse.profiler.flags import megatron_flags
from megatron_paradyse.profiler.lengths import check_lengths, default_lengths
from megatron_paradyse.profiler.run import Options as ProfileOptions
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
    network = find_network(interconnect, ranks)
    megatron = megatron_flags([*flags, *GROUP_FLAGS], model_path=model, ranks=ranks)
    check_group(megatron, ranks)
    if asked.lengths:
        lengths = check_lengths(asked.lengths, p=ranks)
    else:
        longest = asked.max_length or _sequence_length(megatron)
        lengths = default_lengths(longest, p=ranks)
    options = Options(
        output=asked.output,
        network=network,
        strategies=strategies,
        lengths=lengths,
        batch_sizes=asked.batch_sizes,
        memory_bytes=asked.memory_bytes,
        seconds_per_point=asked.seconds_per_point,
    )

    def report(event: dict) -> None:
        os.write(2, f"{event['text']}\n".encode())

    with quiet():
        stand_in_profile(options, megatron, report)
    report({"text": f"wrote {asked.output}: one device as rank {ranks - 1} of {ranks}, stand-in"})


def _sequence_length(flags: Sequence[str]) -> int:
    for flag, following in zip(flags, [*flags[1:], ""], strict=True):
        name, equals, joined = flag.partition("=")
        value = joined if equals else following
        if name == "--seq-length" and value.isdigit():
            return int(value)
    raise UserError("the longest length is missing: give --max-length, --lengths or --seq-length")
