"""`megatron-paradyse fit` and `accuracy`: options and what they print."""

from __future__ import annotations

import json

import click

from megatron_paradyse.errors import UserError
from megatron_paradyse.option_types import json_option
from megatron_paradyse.units import format_count

# Written out here, because help must not import numpy; a test compares.
MODELS = ("hybrid", "paper")
MAX_WIDTH = 1000


@click.command(
    short_help="Fit cost models to a profile.",
    epilog="Example: megatron-paradyse fit costs-raw.json -o costs.json",
)
@click.argument("table", metavar="FILE")
@click.option("-o", "--output", required=True, metavar="FILE", help="Write the cost file here.")
@click.option(
    "--model",
    type=click.Choice(MODELS),
    default="hybrid",
    show_default=True,
    help="hybrid: this package's; paper: the published one.",
)
@json_option
def fit(table: str, output: str, model: str, as_json: bool) -> None:
    """Fit a model to the measurements in FILE (a profile or a cost file).

    The output holds the same measurements and the fitted model; it may be FILE itself.
    """
    from megatron_paradyse.costs.cost_file import (
        check_cost_output,
        read_cost_file,
        write_cost_file,
    )
    from megatron_paradyse.costs.fitting import fit_table, unfitted

    check_cost_output(output)
    measured = read_cost_file(table).table
    try:
        fitted = fit_table(measured, model)
    except UserError as error:
        raise UserError(f"{table}: {error}") from error
    left_out = unfitted(measured)
    write_cost_file(output, measured, fitted)
    if as_json:
        operations = [
            {
                "strategy": f.strategy,
                "operation": f.operation,
                "min_length": f.min_length,
                "max_length": f.max_length,
            }
            for f in fitted.fits
        ]
        values = {"output": output, "model": model, "operations": operations}
        click.echo(json.dumps({**values, "left_out": left_out}))
        return
    d = measured.description
    click.echo(f"costs {d.source} on {d.hardware.name}, p={d.p}, {d.dtype}, {d.date}")
    for f in fitted.fits:
        longest = fitted.operation(f.strategy, f.operation, f.max_length)
        click.echo(
            f"  {f.strategy} {f.operation}: {format_count(f.min_length)} to "
            f"{format_count(f.max_length)} tokens, at the longest "
            f"{1e3 * longest.time_seconds:.4g} ms, {longest.kept_bytes / 2**20:.4g} MiB kept"
        )
    for line in left_out:
        click.echo(f"  not fitted: {line}")
    click.echo(f"{model} model of {len(fitted.fits)} operations written to {output}")


@click.command(
    short_help="Say how wrong the cost models are.",
    epilog="Example: megatron-paradyse accuracy costs.json --details --plot accuracy.png",
)
@click.argument("table", metavar="FILE")
@click.option("--held-out", metavar="FILE", help="Ask for the lengths of this other profile.")
@click.option("--plot", metavar="FILE", help="Draw the errors (.png, .svg or .pdf).")
@click.option("--details", is_flag=True, help="Every strategy, operation and quantity.")
@json_option
def accuracy(
    table: str, held_out: str | None, plot: str | None, details: bool, as_json: bool
) -> None:
    """Fit both models to parts of FILE and compare them with what they did not see.

    Without --held-out: each interior length is left out in turn, and the longest lengths are
    predicted from those that are 2 and 4 times shorter. Packed rows are left out in turn, too.
    """
    from megatron_paradyse.costs.accuracy import measure_accuracy, to_json_values
    from megatron_paradyse.costs.accuracy_report import (
        detail_table,
        plot_accuracy,
        summary_table,
    )
    from megatron_paradyse.costs.cost_file import read_cost_file
    from megatron_paradyse.costs.description import differences
    from megatron_paradyse.costs.row_accuracy import (
        measure_row_accuracy,
        row_lines,
        summarize_rows,
    )
    from megatron_paradyse.whole_file import check_figure

    if plot is not None:
        check_figure(plot)
    measured = read_cost_file(table).table
    other = None if held_out is None else read_cost_file(held_out).table
    if held_out is not None and other is not None:
        places = (table, held_out)
        found = differences(measured.description, other.description, places=places)
        if found:
            raise UserError(
                f"--held-out {held_out} is a profile of something else ({'; '.join(found)}): give "
                "one of the same model, ranks and machine"
            )
    try:
        errors = measure_accuracy(measured, other)
        of_rows = measure_row_accuracy(measured, other)
    except UserError as error:
        raise UserError(f"{table}: {error}") from error
    if plot is not None:
        plot_accuracy(errors, plot, description=measured.description)
    d = measured.description
    if as_json:
        origin = {"source": d.source, "hardware": d.hardware.name, "date": d.date}
        packed = {"packed_rows": summarize_rows(of_rows)} if of_rows else {}
        click.echo(json.dumps({**origin, **to_json_values(errors), **packed}))
        return
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    if details:
        rows = detail_table(errors)
        # As wide as it is: cut off, forward_seconds and forward_bytes would be one name.
        whole = Measurement.get(console, console.options.update(width=MAX_WIDTH), rows).maximum
        Console(width=max(console.width, whole)).print(rows)
    console.print(summary_table(errors))
    for line in row_lines(of_rows):
        click.echo(line)
    console.print(f"costs {d.source} on {d.hardware.name}, p={d.p}, {d.dtype}, {d.date}")
