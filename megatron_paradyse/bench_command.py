"""`megatron-paradyse bench`: the benchmarks of a checkout, each in a process of its own.

A benchmark is a file of benchmarks/ that takes its options from benchmarks/common.py; the last line
of its standard output is its result as JSON. Nothing of it is imported here.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from megatron_paradyse.option_types import POSITIVE, json_option

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "benchmarks"
MARK = "options(__doc__"  # how a benchmark, unlike what it imports, reads its command line
TIME_LIMIT = 3600.0
GRACE_SECONDS = 10.0  # between asking to end and ending


@dataclass(frozen=True)
class Benchmark:
    """summary: the first line of its docstring; saved: results of it in benchmarks/results/."""

    name: str
    summary: str
    saved: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """What became of one: its result, and what went wrong, so that there is none or none saved."""

    name: str
    seconds: float
    result: dict[str, Any] | None
    error: str | None = None


def find_benchmarks() -> dict[str, Benchmark]:
    """Those of this checkout, by name; UserError where there is none."""
    from megatron_paradyse.errors import UserError

    folder = ROOT / FOLDER
    if not (folder / "common.py").is_file():
        raise UserError(
            f"{folder} is not there: benchmarks are in the project's checkout, not in what pip "
            "installs: clone it, and run pip install -e . there"
        )
    found = {}
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if MARK in text:
            summary = _summary(text) or path.stem
            saved = sorted(p.name for p in (folder / "results").glob(f"{path.stem}-*.json"))
            found[path.stem] = Benchmark(path.stem, summary, tuple(saved))
    return found


def _summary(text: str) -> str:
    """The first line of its docstring; of one that is not Python, as while it is written, why."""
    try:
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    except (SyntaxError, ValueError) as error:
        return f"cannot be read as Python: {error}"


@click.command(
    epilog="Example: megatron-paradyse bench planner overhead --quick --time-limit 120",
    short_help="List the benchmarks of a checkout, or run them.",
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "run_all", is_flag=True, help="Run every benchmark, one after the other.")
@click.option("--quick", is_flag=True, help="About a minute of each, on two idle cores.")
@click.option("--save", is_flag=True, help="Write results to benchmarks/results/ too.")
@click.option(
    "--time-limit",
    type=POSITIVE,
    default=TIME_LIMIT,
    show_default=True,
    metavar="SECONDS",
    help="End a benchmark that takes longer, and go on with the next.",
)
@json_option
def bench(
    names: tuple[str, ...],
    run_all: bool,
    quick: bool,
    save: bool,
    time_limit: float,
    as_json: bool,
) -> int:
    """Run the benchmarks NAME..., or without a name list those that there are.

    Each prints what it is doing to stderr. Ends with 1 where one failed or took too long. Options
    that only one of them has: python -m benchmarks.NAME --help.
    """
    from megatron_paradyse.errors import UserError

    if quick and save:
        raise UserError("--quick and --save: a quick result would replace the full one: give one")
    known = find_benchmarks()
    chosen = _chosen(names, run_all, known)
    if not chosen:
        _check_list(quick=quick, save=save, time_limit=time_limit)
        _list(known, as_json)
        return 0
    runs = []
    for name in chosen:
        click.echo(f"== {name}: {known[name].summary}", err=True)
        runs.append(run_benchmark(name, [*["--quick"] * quick, *["--save"] * save], time_limit))
        if runs[-1].error:
            click.echo(f"{name}: {runs[-1].error}", err=True)
        if not as_json:
            _print(runs[-1])
    if as_json:
        click.echo(json.dumps({"benchmarks": [vars(run) for run in runs]}))
    return 1 if any(run.error for run in runs) else 0


def _chosen(names: Sequence[str], run_all: bool, known: dict[str, Benchmark]) -> list[str]:
    from megatron_paradyse.errors import UserError, did_you_mean

    if run_all and names:
        raise UserError(f"--all and {names[0]}: give --all, or names")
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise UserError(f"no benchmark named {name!r:.60}: {near}use one of {', '.join(known)}")
    return list(known) if run_all else list(dict.fromkeys(names))


def _check_list(*, quick: bool, save: bool, time_limit: float) -> None:
    """UserError for an option of running them, where they are only listed."""
    from megatron_paradyse.errors import UserError

    given = {"--quick": quick, "--save": save, "--time-limit": time_limit != TIME_LIMIT}
    for name in (name for name, is_given in given.items() if is_given):
        raise UserError(f"{name} without a benchmark runs none: name some, or give --all")


def _list(known: dict[str, Benchmark], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"benchmarks": [vars(one) for one in known.values()]}))
        return
    width = max(map(len, known), default=0)
    for one in known.values():
        click.echo(f"{one.name:<{width}}  {one.summary}")
        for name in one.saved:
            click.echo(f"{'':<{width}}  {FOLDER}/results/{name}")
    click.echo("\nmegatron-paradyse bench NAME --quick runs one in about a minute.")


def run_benchmark(name: str, arguments: Sequence[str], time_limit: float) -> Run:
    """Run one to its end or to the limit; nothing that it started stays behind."""
    start = time.monotonic()
    command = [sys.executable, "-m", f"{FOLDER}.{name}", "--json", *arguments]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired:
            remedy = "give a larger --time-limit, or --quick"
            error = f"took longer than {time_limit:g} s: {remedy}"
            return Run(name, time.monotonic() - start, None, error)
        finally:
            _end(process)
    seconds = time.monotonic() - start
    result, why = _result(output)
    if process.returncode:  # there may be a result that could not be saved
        why = f"ended with exit code {process.returncode}: see above"
    return Run(name, seconds, result, why)


def _result(output: str) -> tuple[dict[str, Any] | None, str | None]:
    """The last line, or why it is none."""
    try:
        result = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None, "its last line of output is not JSON"
    if not isinstance(result, dict):
        return None, "its last line of output is no JSON object"
    return result, None


def _end(process: subprocess.Popen) -> None:
    """End a process and its group: politely first, for some have ranks of their own to end."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)


def _print(run: Run) -> None:
    """The plain numbers and texts of a result; tables inside it are for --json and --save."""
    if run.result is None:
        return
    for key, value in run.result.items():
        if isinstance(value, dict | list):
            click.echo(f"  {key}: {len(value)} entries, with --json")
        else:
            click.echo(f"  {key}: {f'{value:.4g}' if isinstance(value, float) else value}")
    click.echo(f"{run.name}: {run.seconds:.1f} s")
