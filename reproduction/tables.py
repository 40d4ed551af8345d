"""The CSV files of results/: a comment that says where the numbers come from, then columns.

# source: simulated; hardware; date; versions
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """Rows as text; origin: what the comment says after `source:`."""

    origin: str
    rows: list[dict[str, str]] = field(default_factory=list)

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
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]], *, made: str
) -> None:
    """Write rows under a comment, all or nothing; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        whole_file(path) as temporary,
        open(temporary, "w", encoding="utf-8", newline="") as stream,
    ):
        stream.write(f"# source: {made}\n")
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
    """Write rows in the place of those for which replaces(row) is true, or at the end."""
    known = read_table(path)
    present = known.rows if known else []
    place = next((i for i, row in enumerate(present) if replaces(row)), len(present))
    after = [row for row in present[place:] if not replaces(row)]
    write_table(path, columns, [*present[:place], *rows, *after], made=made)


def read_table(path: Path) -> Table | None:
    """The file's rows, or None where there is none; UserError if it is no such file."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as stream:
        first = stream.readline()
        if not first.startswith("# source: "):
            raise UserError(f"{path}: the first line must be '# source: ...', got {first[:40]!r}")
        return Table(first.removeprefix("# source: ").strip(), list(csv.DictReader(stream)))
