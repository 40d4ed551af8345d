"""The command `megatron-paradyse doctor`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

import click

from megatron_paradyse.doctor import FAULT, LACK, OK, SKIP, Check
from megatron_paradyse.option_types import json_option


@click.command(epilog="Example: megatron-paradyse doctor --json")
@json_option
def doctor(as_json: bool) -> int:
    """Check this machine and the installed versions; ends with 0 if training can run here.

    Takes some seconds, because it imports PyTorch and Megatron in a process of its own; uses no
    network.
    """
    from megatron_paradyse.doctor.checks import check_all
    from megatron_paradyse.errors import UserError

    try:
        os.getcwd()
    except FileNotFoundError as error:  # every import would fail, and its package be blamed
        raise UserError("the current folder is gone: cd to one that is there") from error
    checks = check_all()
    can_train = not any(check.state == FAULT for check in checks)
    if as_json:
        values: dict[str, Any] = {"can_train": can_train}
        click.echo(json.dumps({**values, "checks": [dataclasses.asdict(c) for c in checks]}))
    else:
        _print(checks)
        click.echo("training can run here" if can_train else "training cannot run here")
    return 0 if can_train else 1


def _print(checks: list[Check]) -> None:
    """A table on a terminal, plain lines elsewhere."""
    if not sys.stdout.isatty():
        for check in checks:
            click.echo(f"{check.state:<6}{check.name}: {check.found}")
            for label, text in (("costs", check.cost), ("mend", check.remedy)):
                if text:
                    click.echo(f"      {label}: {text}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {OK: "green", LACK: "yellow", FAULT: "bold red", SKIP: "cyan"}
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in ("", "what", "found"):
        table.add_column(column)
    for check in checks:
        found = Text(check.found)
        for text, style in ((check.cost, "default"), (check.remedy, "cyan")):
            if text:
                found.append(f"\n{text}", style=style)
        table.add_row(Text(check.state, style=colours[check.state]), check.name, found)
    Console().print(table)
