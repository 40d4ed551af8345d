"""Options that several commands have; a wrong value is wrong usage, named with its option."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from megatron_paradyse.errors import UserError
from megatron_paradyse.units import (
    MAX_BATCH_SIZE,
    MAX_SEQ_LENGTH,
    parse_bytes,
    parse_count,
    parse_ratio,
)

# Of a command that takes Megatron's flags too.
PASS_ON = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
MAX_NUMBER = 1e9  # of seconds, or bytes of a parameter: what a clock takes
MOST, MOST_PACKED = 100, 10_000  # values in a list; documents in a row


class Parsed(click.ParamType[Any]):
    """A click type from a function that raises UserError."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except UserError as error:
            self.fail(str(error), param, ctx)


def _counts(text: str, high: int, example: str, most: int = MOST) -> tuple[int, ...]:
    counts = tuple(parse_count(part) for part in text.split(",") if part.strip())
    if not 1 <= len(counts) <= most or not all(1 <= count <= high for count in counts):
        raise UserError(
            f"expected 1 to {most:,} numbers from 1 to {high:,}, such as {example}, "
            f"got {text[:60]!r}"
        )
    return counts


def _size(text: str) -> int:
    size = parse_bytes(text)
    if size <= 0:
        raise UserError(f"a memory of {text} holds nothing: give that of a rank, such as 76GiB")
    return size


def _file(text: str) -> str:
    """A flag after an option that takes a file is no name of one."""
    if text.startswith("-"):
        raise UserError(f"expected the name of a file, got {text[:60]}: put FILE before it")
    return text


class _Range(click.FloatRange):
    """A range without nan, which click's own lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


COUNT = Parsed("count", parse_count)
REPLICAS = click.IntRange(2, 1024)
SHARE, POSITIVE_SHARE = _Range(0, 1), _Range(0, 1, min_open=True)
SECONDS, POSITIVE = _Range(0, MAX_NUMBER), _Range(0, MAX_NUMBER, min_open=True)
RATIO = Parsed("factor", parse_ratio)
SIZE = Parsed("size", _size)
BYTES = Parsed("size", parse_bytes)
FILE = Parsed("file", _file)
LENGTHS = Parsed("lengths", lambda text: _counts(text, MAX_SEQ_LENGTH, "1K,32K,300K"))
DOCUMENTS = Parsed("documents", lambda text: _counts(text, MAX_SEQ_LENGTH, "512,1K", MOST_PACKED))
BATCH_SIZES = Parsed(  # each once, as lengths are: costs are told by them
    "sizes", lambda text: tuple(dict.fromkeys(_counts(text, MAX_BATCH_SIZE, "1,2")))
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
