"""The commands `megatron-paradyse plan` and `max-length`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from megatron_paradyse.errors import UserError
from megatron_paradyse.option_types import (
    BYTES,
    DOCUMENTS,
    FILE,
    LENGTHS,
    PASS_ON,
    POSITIVE,
    POSITIVE_SHARE,
    REPLICAS,
    SHARE,
    json_option,
)

if TYPE_CHECKING:
    from megatron_paradyse.preview.longest import Longest
    from megatron_paradyse.preview.measured_text import Measured
    from megatron_paradyse.preview.setup import Setup

# Written out here, because help must import little; a test compares.
GRANULARITIES = ("operation", "layer", "sequence")
RESOLUTION = 0.02  # of measured limits


def policy_options(command: Callable) -> Callable:
    """The options that both commands have: how a training would choose."""
    options = [
        click.argument("costs", metavar="COSTS"),
        click.option("--memory-budget", metavar="SIZE", help="Memory of a rank, such as 76GiB."),
        click.option("--host-memory", metavar="SIZE", help="A rank's host memory for +offload."),
        click.option(
            "--static-memory",
            type=BYTES,
            metavar="SIZE",
            help="What a rank holds always, as training says at its start; default: as profiled.",
        ),
        click.option(
            "--memory-margin",
            type=SHARE,
            metavar="SHARE",
            help="How far a real peak may be above its prediction; default 0.03.",
        ),
        click.option("--strategies", metavar="NAMES", help="Comma-separated; default: all."),
        click.option(
            "--no-offload",
            "offload",
            flag_value=False,
            type=bool,
            default=None,
            help="No plan keeps inputs of layers in host memory.",
        ),
        click.option("--granularity", type=click.Choice(GRANULARITIES), help="Default operation."),
        click.option("--head-tile", metavar="TOKENS", help="As in training; default: the costs'."),
        click.option("--config", metavar="FILE", help="YAML of settings, as --paradyse-config."),
        click.option(
            "--num-layers",
            type=int,
            help="With those of multi-token prediction; default: the costs'.",
        ),
        click.option("--batch-size", type=click.IntRange(1, 1 << 20), default=1, help="Default 1."),
        json_option,
    ]
    return functools.reduce(lambda made, option: option(made), reversed(options), command)


@click.command(
    short_help="Tell which plan training would choose, and why.",
    epilog="Example: megatron-paradyse plan costs.json --lengths 1K,32K,300K --explain",
)
@click.option("--lengths", type=LENGTHS, help="Such as 1K,32K,300K.")
@click.option("--documents", type=DOCUMENTS, help="Packed into one microbatch, such as 512,1K,4K.")
@click.option(
    "--spread",
    type=REPLICAS,
    metavar="REPLICAS",
    help="--documents: over so many replicas (--paradyse-spread).",
)
@click.option("--policy", metavar="POLICY", help="optimal (default), heuristic[:no-mix,...].")
@click.option(
    "--mixing-gain",
    type=SHARE,
    metavar="SHARE",
    help="What mixing must gain; default: 0.05 by measured costs.",
)
@click.option("--pipeline-stages", type=click.IntRange(1), default=1, help="Default 1.")
@click.option("--pipeline-stage", type=click.IntRange(1), default=1, help="Which; default 1.")
@click.option("--microbatches", type=click.IntRange(1), help="Of a pipeline; default: its stages.")
@click.option("--forward-only", is_flag=True, help="As an evaluation runs, without backward.")
@click.option("--explain", is_flag=True, help="Walk through each decision.")
@policy_options
def plan(
    lengths: tuple[int, ...] | None,
    documents: tuple[int, ...] | None,
    spread: int | None,
    pipeline_stages: int,
    pipeline_stage: int,
    microbatches: int | None,
    forward_only: bool,
    explain: bool,
    costs: str,
    config: str | None,
    num_layers: int | None,
    static_memory: int | None,
    batch_size: int,
    as_json: bool,
    **flags: str | float | bool | None,
) -> None:
    """Tell which plan training with the fitted costs in COSTS would choose for each length, and
    for one packed microbatch of --documents.

    The same planner, budget rules and settings as training with --paradyse-cost-model COSTS, from
    that file alone; nothing runs. Smoothing, which depends on what was planned before, is left out.
    """
    from megatron_paradyse.preview.explain import explanation
    from megatron_paradyse.preview.forecast import forecast, forecast_row
    from megatron_paradyse.preview.plan_text import plan_report, plan_values
    from megatron_paradyse.preview.setup import Grid, make_setup

    grid = Grid(pipeline_stages, pipeline_stage, microbatches)
    if not (lengths or documents):
        raise UserError("nothing to plan: give --lengths, --documents, or both")
    if spread is not None and documents is None:
        raise UserError(f"--spread {spread} is of packed documents: give --documents too")
    if batch_size > 1 and not lengths:
        raise UserError(
            f"--batch-size {batch_size} with --documents: a packed microbatch is one row: leave it "
            "out, or give --lengths too"
        )
    if microbatches is not None and pipeline_stages == 1:
        raise UserError(
            f"--microbatches {microbatches} is of a pipeline: give --pipeline-stages too"
        )
    packed = documents is not None
    setup = make_setup(
        costs,
        flags,
        config,
        num_layers=num_layers,
        static_memory=static_memory,
        grid=grid,
        packed=packed,
    )
    found = [forecast(setup, s, batch_size, forward_only=forward_only) for s in lengths or ()]
    if documents is not None:
        found.append(forecast_row(setup, documents, forward_only=forward_only, spread=spread or 1))
    if as_json:
        click.echo(json.dumps(plan_values(setup, found)))
        return
    click.echo(plan_report(setup, found))
    if explain:
        for one in found:
            click.echo(f"\n{explanation(setup, one)}")


def _refuse(given: list[str]) -> None:
    """Options of a measurement that was not asked for."""
    if given:
        raise click.UsageError(
            f"{given[0]} is for measuring: give --measure FILE too, or leave it out"
        )


@click.command(
    "max-length",
    short_help="Tell the longest sequence that each strategy can train.",
    context_settings=PASS_ON,
    epilog="Example: megatron-paradyse max-length costs.json --memory-budget 76GiB",
)
@click.option("--figure", metavar="FILE", help="Draw it as bars (.png, .svg or .pdf).")
@click.option(
    "--spread",
    type=REPLICAS,
    metavar="REPLICAS",
    help="Also of a document over so many replicas (--paradyse-spread).",
)
@click.option("--measure", type=FILE, metavar="FILE", help="Run it, too: trials into FILE (JSON).")
@click.option("--nproc", type=click.IntRange(1), metavar="P", help="--measure: start P ranks here.")
@click.option("--stand-in", is_flag=True, help="--measure: this device alone, as one of the ranks.")
@click.option("--model", metavar="NAME|FILE", help="--measure: a named model, or YAML of flags.")
@click.option(
    "--resolution",
    type=POSITIVE_SHARE,
    metavar="SHARE",
    help="--measure: how closely; default 0.02.",
)
@click.option(
    "--most-seconds",
    type=POSITIVE,
    metavar="SECONDS",
    help="--measure: leave out what is predicted to take longer.",
)
@click.option(
    "--measure-only",
    metavar="NAMES",
    help="--measure: the limits of these alone, ParaDySe among them; default: all.",
)
@policy_options
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[MEGATRON FLAGS]...")
def max_length(
    figure: str | None,
    spread: int | None,
    measure: str | None,
    nproc: int | None,
    stand_in: bool,
    model: str | None,
    resolution: float | None,
    most_seconds: float | None,
    measure_only: str | None,
    costs: str,
    config: str | None,
    num_layers: int | None,
    static_memory: int | None,
    batch_size: int,
    as_json: bool,
    flags: tuple[str, ...],
    **settings: str | float | bool | None,
) -> None:
    """Tell the longest sequence that fits into the memory of a rank, by the costs in COSTS.

    For each strategy on all layers, and for ParaDySe's plans of the same strategies.

    With --measure whole iterations of the model of the Megatron flags run at lengths about each
    limit, on --nproc ranks, under torchrun, or on one device as a --stand-in for a rank. An
    interrupted measurement goes on where it stopped.
    """
    from megatron_paradyse.preview.longest import find_longest
    from megatron_paradyse.preview.setup import make_setup
    from megatron_paradyse.whole_file import check_figure

    if measure is None:
        given = {
            "--nproc": nproc,
            "--model": model,
            "--stand-in": stand_in or None,
            "--resolution": resolution,
            "--most-seconds": most_seconds,
            "--measure-only": measure_only,
        }
        _refuse([*flags[:1], *(name for name, value in given.items() if value is not None)])
    if spread is not None and batch_size > 1:
        raise UserError(
            f"--spread {spread} with --batch-size {batch_size}: a packed microbatch is one row: "
            "leave one of them out"
        )
    resolution = RESOLUTION if resolution is None else resolution
    if figure is not None:
        check_figure(figure)
    setup = make_setup(
        costs,
        {"policy": "optimal", **settings},
        config,
        num_layers=num_layers,
        static_memory=static_memory,
    )
    found = find_longest(setup, batch_size, spread=spread or 1)
    only = None if measure_only is None else _some_of(found, measure_only)
    tell = functools.partial(_tell_longest, setup, found, figure=figure, as_json=as_json)
    if measure is None:
        tell(None)
        return
    from megatron_paradyse.preview.measure import How, run_measurement
    from megatron_paradyse.preview.measured import measured_limits, of_file, read_trials

    def tell_measured() -> None:
        about, trials = read_trials(measure)
        limits = measured_limits(found, of_file(trials), resolution=resolution, only=only)
        tell((about, limits))

    how = How(measure, nproc, stand_in, model, resolution, most_seconds, only)
    run_measurement(how, setup, found, flags, tell_measured)
    tell_measured()


def _some_of(found: Longest, names: str) -> list[str]:
    """What --measure-only names; UserError for what is not among the limits."""
    only = [name.strip() for name in names.split(",")]
    there = [limit.strategy for limit in (found.paradyse, *found.single)]
    for name in only:
        if name not in there:
            raise UserError(f"--measure-only {name}: give some of {', '.join(there)}")
    return only


def _tell_longest(
    setup: Setup,
    found: Longest,
    measured: Measured | None,
    *,
    figure: str | None,
    as_json: bool,
) -> None:
    from megatron_paradyse.preview.longest_text import longest_report, longest_values

    if figure is not None:
        from megatron_paradyse.preview.longest_figure import draw_longest

        draw_longest(setup, found, figure, measured)
    if as_json:
        click.echo(json.dumps(longest_values(setup, found, measured)))
        return
    click.echo(longest_report(setup, found, measured))
    if figure is not None:
        click.echo(f"drawn into {figure}")
