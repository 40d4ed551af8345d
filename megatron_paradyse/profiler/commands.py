"""The command `megatron-paradyse profile`."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import click
from click.core import ParameterSource

from megatron_paradyse.errors import UserError
from megatron_paradyse.option_types import BATCH_SIZES, COUNT, LENGTHS, PASS_ON, SECONDS, SIZE
from megatron_paradyse.profiler.points import Options

QUICK_SECONDS_PER_POINT = 0.05
NETWORK_TAKES = {"nproc", "output", "as_json", "flags"}  # parameters of profile network


@click.command(
    context_settings=PASS_ON,
    epilog="Example: megatron-paradyse profile --nproc 4 --output costs-raw.json --num-layers 4 "
    "--hidden-size 256 --num-attention-heads 8 --seq-length 8192 --max-position-embeddings 8192 "
    "--vocab-size 1024",
)
@click.option("--nproc", type=click.IntRange(1), metavar="P", help="Start P ranks here.")
@click.option("-o", "--output", required=True, metavar="FILE", help="JSON to write.")
@click.option("--model", type=click.Path(), help="YAML of Megatron flags, or a file for train.")
@click.option("--lengths", type=LENGTHS, help="Such as 1K,4K,16K; default: 8, log-spaced.")
@click.option(
    "--bytes-lengths", type=LENGTHS, help="Measure bytes only; default: some between those."
)
@click.option("--max-length", type=COUNT, help="The longest default length; default: --seq-length.")
@click.option("--batch-sizes", type=BATCH_SIZES, default="1", help="Such as 1,2; default 1.")
@click.option("--strategies", help="Comma-separated; default: all, with and without +recompute.")
@click.option("--budget-seconds", type=SECONDS, help="Stop after so long.")
@click.option("--quick", is_flag=True, help="4 lengths, shorter runs, no checks: less accurate.")
@click.option("--packed", is_flag=True, help="Attention on packed rows too.")
@click.option("--memory", type=SIZE, help="Of a rank, such as 76GiB; longer lengths are left out.")
@click.option(
    "--stand-in", type=click.IntRange(2, 1024), metavar="P", help="This device alone, as one of P."
)
@click.option(
    "--interconnect", metavar="NAME|FILE", help="Of a stand-in: nvlink4, or a measured file."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines at the end.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[MEGATRON FLAGS]...")
def profile(
    nproc: int | None,
    output: str,
    model: str | None,
    lengths: tuple[int, ...] | None,
    bytes_lengths: tuple[int, ...] | None,
    max_length: int | None,
    batch_sizes: tuple[int, ...],
    strategies: str | None,
    budget_seconds: float | None,
    quick: bool,
    packed: bool,
    memory: int | None,
    stand_in: int | None,
    interconnect: str | None,
    as_json: bool,
    flags: tuple[str, ...],
) -> None:
    """Measure what every strategy costs on this machine, for the model of the Megatron flags.

    Give --nproc, or start it under torchrun. An interrupted profile goes on where it stopped.

    `profile network` measures latency and bandwidth of the collectives instead; --stand-in P takes
    them from such a file, or from a named interconnect, and profiles one device as rank P-1 of P.
    """
    from megatron_paradyse.profiler.flags import megatron_flags
    from megatron_paradyse.profiler.lengths import check_longest
    from megatron_paradyse.profiler.points import strategies_to_profile
    from megatron_paradyse.profiler.start import as_rank, launched, ranks_there, start_ranks
    from megatron_paradyse.train_command import take_environment
    from megatron_paradyse.whole_file import check_output, check_replaced

    check_output(output)
    network = flags[:1] == ("network",)
    if network:
        _check_network_alone(flags[1:])
    else:
        _check_begun(output)
    check_longest(lengths, max_length)
    take_environment(model)
    options = Options(
        output=output,
        lengths=lengths,
        bytes_lengths=bytes_lengths,
        max_length=max_length,
        batch_sizes=batch_sizes,
        strategies=None if strategies is None else tuple(strategies.split(",")),
        budget_seconds=budget_seconds,
        memory_bytes=memory,
        quick=quick,
        packed=packed,
    )
    if quick:
        options = dataclasses.replace(options, seconds_per_point=QUICK_SECONDS_PER_POINT)
    chosen = strategies_to_profile(options.strategies)
    if stand_in is not None:
        from megatron_paradyse.simulator.stand_in_command import profile_stand_in

        if nproc is not None or launched():
            raise UserError(f"--stand-in {stand_in} is one process: leave out --nproc and torchrun")
        if packed:
            raise UserError("--stand-in measures no packed rows: leave out --packed, or simulate")
        profile_stand_in(
            options, chosen, flags, ranks=stand_in, interconnect=interconnect, model=model
        )
        if as_json:
            _print_outcome(output, network=False)
        return
    if interconnect is not None:
        raise UserError("--interconnect describes a --stand-in: real ranks are measured")
    ranks = ranks_there(nproc)
    if not ranks:
        raise UserError("give --nproc P to start P ranks here, or start it under torchrun")
    if network:
        if ranks < 2:
            raise UserError(f"a network is of 2 ranks or more, got {ranks}: give --nproc 2 or more")
        check_replaced(output, "a network's", ('"collectives"',))
    megatron = [] if network else megatron_flags(flags, model_path=model, ranks=ranks)
    if not launched():
        start_ranks(sys.argv[1:], ranks=ranks, output=Path(output))
        if as_json:
            _print_outcome(output, network=network)
        else:
            click.echo(f"wrote {output}")
        return

    def work(report: Callable[[dict], None]) -> None:
        if network:
            from megatron_paradyse.simulator.measure_network import measure_network

            measure_network(output)
        else:
            from megatron_paradyse.profiler import run

            run.profile(options, megatron, report)

    as_rank(work, functools.partial(_print_outcome, output, network=network) if as_json else None)


def _check_begun(output: str) -> None:
    """UserError for a file with which no profile can go on, before ranks have started for it."""
    from megatron_paradyse.costs.cost_file import check_cost_output, read_cost_file

    check_cost_output(output)
    if os.path.exists(output):
        read_cost_file(output)


def _check_network_alone(flags: tuple[str, ...]) -> None:
    """UserError for an option or a flag of a profile, which it does not read."""
    context = click.get_current_context()
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name not in NETWORK_TAKES
        and context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    ]
    for name in (*given, *flags):
        raise UserError(f"{name} with profile network, which measures no model: leave it out")


def _print_outcome(output: str, *, network: bool) -> None:
    from megatron_paradyse.profiler.outcome import outcome

    click.echo(json.dumps(outcome(output, network=network)))
