"""RESULTS.md, from the CSV files beside it: `python -m reproduction.results [FOLDER]`.

Numbers come from the files; the sentences on differences are written by hand (differences.py) and
true for the committed numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_paradyse.whole_file import write_whole
from reproduction import result_headlines, result_sections
from reproduction.names import FORMS
from reproduction.options import ROOT
from reproduction.tables import Table, read_table

NAMES = (
    *(f"{name}-{form}" for name in ("figure2", "table5", "case_study") for form in FORMS),
    *("headlines-simulated", "crossovers-simulated", "check-simulated", "peer-simulated"),
    *("authors_fits", "table3"),
)
FIGURES = tuple(f"{name}-{form}.png" for form in FORMS for name in ("figure2", "figure2-shuffled"))


def write(folder: Path) -> Path:
    """RESULTS.md of the folder; what has not run is called that."""
    files = {name: read_table(folder / f"{name}.csv") for name in NAMES}
    sections = [
        _head(files),
        result_headlines.headlines(files),
        result_headlines.checks(files["check-simulated"]),
        result_headlines.crossovers(files["crossovers-simulated"]),
        _figures(folder),
        result_sections.ablations(files),
        result_sections.contributions(files["table5-simulated"]),
        result_sections.case_study(files),
        result_sections.lengths(files["table3"]),
        result_sections.peer(files["peer-simulated"]),
        result_sections.open_points(),
    ]
    path = folder / "RESULTS.md"
    write_whole(path, "\n\n".join(section for section in sections if section) + "\n")
    return path


def _head(files: dict[str, Table | None]) -> str:
    lines = [result_sections.INTRODUCTION, "", "| file | source |", "| --- | --- |"]
    for name, found in files.items():
        lines.append(f"| {name}.csv | {found.origin if found else 'not run'} |")
    return "\n".join(lines)


def _figures(folder: Path) -> str:
    found = [name for name in FIGURES if (folder / name).is_file()]
    return "\n\n".join(
        ["## Figure 2", *(f"![{name.removesuffix('.png')}]({name})" for name in found)]
    )


if __name__ == "__main__":
    print(write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results"))
