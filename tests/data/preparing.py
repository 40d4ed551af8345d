"""`data prepare` of JSON lines."""

from __future__ import annotations

import json

from click.testing import CliRunner

from megatron_paradyse.cli import cli


def prepare(folder, records: list[dict], *options: object):
    """`data prepare` of these lines to folder/out, and what it printed."""
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    prefix = folder / "out"
    arguments = [str(option) for option in ("data", "prepare", path, "-o", prefix, *options)]
    return prefix, CliRunner().invoke(cli, arguments)
