"""The CSV files of results/: comments that say where the numbers come from, then columns.

# source: simulated; hardware; date; versions
# source from row 225 on: the same of a later run that replaced some rows
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import itertools
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_paradyse.errors import UserError
from megatron_paradyse.whole_file import whole_file

Row = Mapping[str, str]

FIGURE2 = (
    *("model", "distribution", "order", "policy", "document"),
    *("tokens", "seconds", "peak_bytes", "plan"),
)
TABLE5 = (
    *("model", "distribution", "framework", "max_tokens", "cumulative_seconds"),
    *("full_seconds_to_same_length", "saved_share", "ci_low", "ci_high"),
)
CASE_STUDY = ("part", "seconds")
TABLE3 = (
    *("dataset", "tokenizer", "source", "bucket"),
    *("documents", "share", "paper_share", "max_tokens"),
)


@dataclass(frozen=True)
class Table:
    """Rows as text; origins: what the comments say of each row."""

    origins: list[str]
    rows: list[dict[str, str]]

    @property
    def origin(self) -> str:
        """Of all rows: one, unless a later run replaced some."""
        return " and ".join(dict.fromkeys(self.origins))

    @property
    def hardware(self) -> str:
        return " and ".join(dict.fromkeys(one.split(";")[1].strip() for one in self.origins))

    def where(self, **values: str) -> list[dict[str, str]]:
        """The rows that have these values."""
        return [r for r in self.rows if all(r[name] == value for name, value in values.items())]


def origin(source: str, hardware: str) -> str:
    """What the comment of a file made now says."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "megatron-core")
    )
    date = datetime.date.today().isoformat()
    return f"{source}; {hardware}; {date}; Python {platform.python_version()}, {versions}"


def text(value: object) -> str:
    """A cell: six digits of a number, nothing for None."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_table(
    path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]], *, made: str
) -> None:
    """Write rows under a comment, all or nothing; the folder is made."""
    _write(path, columns, rows, [made] * len(rows) or [made])


def _write(
    path: Path,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, object]],
    origins: Sequence[str],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        whole_file(path) as temporary,
        open(temporary, "w", encoding="utf-8", newline="") as stream,
    ):
        stream.write(f"# source: {origins[0]}\n")
        for number, (before, made) in enumerate(itertools.pairwise(origins), 2):
            if made != before:
                stream.write(f"# source from row {number} on: {made}\n")
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([text(row[name]) for name in columns] for row in rows)


def of_panels(models: Sequence[str], distributions: Sequence[str]) -> Callable[[Row], bool]:
    """Whether a row is of one of these models on one of these distributions."""
    return lambda row: row["model"] in models and row["distribution"] in distributions


def update_table(
    path: Path,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, object]],
    *,
    made: str,
    replaces: Callable[[Row], bool],
) -> None:
    """Write rows in the place of those for which replaces(row) is true, or at the end.

    The others keep their origin.
    """
    known = read_table(path) or Table([], [])
    present = list(zip(known.rows, known.origins, strict=True))
    place = next((i for i, (row, _) in enumerate(present) if replaces(row)), len(present))
    after = [(row, kept) for row, kept in present[place:] if not replaces(row)]
    both = [*present[:place], *((row, made) for row in rows), *after]
    _write(path, columns, [row for row, _ in both], [kept for _, kept in both] or [made])


def read_table(path: Path) -> Table | None:
    """The file's rows, or None where there is none; UserError if it is no such file."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as stream:
        lines = list(stream)
    found = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    matches = (re.fullmatch(r"# source(?: from row (\d{1,9}) on)?: (.*)\n", line) for line in found)
    starts = [match for match in matches if match is not None]
    whole = [number for number, start in enumerate(starts) if start[1] is None]
    if len(starts) != len(found) or whole != [0]:
        raise UserError(
            f"{path}: the first line must be '# source: ...', other comments "
            f"'# source from row N on: ...', got {lines[: len(found) or 1]!r:.60}"
        )
    rows = list(csv.DictReader(lines[len(found) :]))
    origins = [starts[0][2]] * len(rows)
    for start in starts[1:]:
        first = int(start[1]) - 1
        origins[first:] = [start[2]] * len(origins[first:])
    return Table(origins, rows)
