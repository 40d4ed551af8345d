"""The command `megatron-paradyse report`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from megatron_paradyse.errors import UserError
from megatron_paradyse.units import counted

MOST_TRACES = 256


@click.command(
    epilog="Example: megatron-paradyse report trace.jsonl --costs costs.json --output report.html"
)
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True)
@click.option("--costs", metavar="FILE", help="The fitted cost file, for estimates and curves.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    default="report.html",
    show_default=True,
    help="The page; its figures as PNG go into the folder FILE-figures beside it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the page's numbers as JSON.")
def report(traces: tuple[str, ...], costs: str | None, output: str, as_json: bool) -> None:
    """Draw what training wrote with --paradyse-trace: one HTML page that needs no network.

    With several grids (replicas, pipeline stages), give the trace of each.
    """
    from megatron_paradyse.costs.cost_file import read_cost_file
    from megatron_paradyse.report.content import Content
    from megatron_paradyse.report.figures import draw_all
    from megatron_paradyse.report.page import render
    from megatron_paradyse.report.trace_file import read_trace, warning_lines
    from megatron_paradyse.whole_file import check_output, write_whole

    if len(traces) > MOST_TRACES:
        raise UserError(f"{len(traces)} traces: give at most {MOST_TRACES}, such as one replica's")
    for path, count in Counter(map(os.path.realpath, traces)).items():
        if count > 1:
            raise UserError(f"{path} is given {count} times: give each trace once")
    page = Path(output)
    check_output(output)
    if page.suffix.lower() not in (".html", ".htm"):  # such as the trace: it would be replaced
        raise UserError(f"the page ends in .html, got --output {output}: give another name")
    fitted = None if costs is None else read_cost_file(costs)
    if fitted is not None:
        fitted.require_model()
    content = Content([read_trace(path, fitted) for path in traces], fitted)
    warnings = [line for trace in content.traces for line in warning_lines(trace)]
    warnings += content.warnings()
    for line in warnings:
        click.echo(f"warning: {line}", err=True)
    folder = page.with_name(f"{page.stem}-figures")
    with _folder(folder):
        figures = draw_all(content, os.fspath(folder))
        write_whole(output, render(content, figures, warnings))
    drawn = [os.fspath(folder / f"{figure.name}.png") for figure in figures if not figure.missing]
    if as_json:
        numbers = {**content.as_json(), "output": output, "figures": drawn, "warnings": warnings}
        click.echo(json.dumps(numbers))
        return
    for figure in figures:
        if figure.missing:
            click.echo(f"not drawn: {figure.title}: {figure.missing}", err=True)
    where = f" in {folder}/" if drawn else ""
    click.echo(f"{counted(len(drawn), 'figure')}{where}, the page is {output}")


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[None]:
    """A folder for figures; where it is new and they do not all come, it does not stay either."""
    is_new = not path.exists()
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: choose another --output") from error
    try:
        yield
    except BaseException:  # Ctrl-C too
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        raise
    if is_new and not any(path.iterdir()):
        path.rmdir()
