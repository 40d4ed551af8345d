"""`data prepare` of JSON lines, and the documents of a source."""

from __future__ import annotations

import itertools
import json

from click.testing import CliRunner

from megatron_paradyse.cli import cli


def documents(source) -> list[tuple[str, bytes]]:
    """(place, bytes) of each document."""
    result = []
    for _, chunks in itertools.groupby(source.chunks(), key=lambda chunk: chunk.document):
        chunks = list(chunks)
        result.append((chunks[0].place, b"".join(chunk.data for chunk in chunks)))
    return result


def prepare(folder, records: list[dict], *options: object):
    """`data prepare` of these lines to folder/out, and what it printed."""
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    prefix = folder / "out"
    arguments = [str(option) for option in ("data", "prepare", path, "-o", prefix, *options)]
    return prefix, CliRunner().invoke(cli, arguments)
