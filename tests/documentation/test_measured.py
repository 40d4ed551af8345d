"""Numbers of docs/ against the records of benchmarks/results/ that they were read from."""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.documentation.markdown import ROOT


@cache
def record(benchmark: str) -> dict:
    path = ROOT / "benchmarks/results" / f"{benchmark}-cpu-2-cores.json"
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def rows(page: str) -> dict[str, str]:
    """Of every table on a page, the second cell by the first."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {first: second for first, second, *_ in cells}


def cell(page: str, begins: str) -> str:
    found = [second for first, second in rows(page).items() if first.startswith(begins)]
    assert len(found) == 1, (page, begins, found)
    return found[0]


FLAGS = record("megatron_flags")
EQUAL = {name: row for name, row in FLAGS["rows"].items() if row["is"] == "equal"}
OTHERS = [row for name, row in EQUAL.items() if "experts" not in name.lower()]


@pytest.mark.parametrize(
    ("begins", "expected"),
    [
        (f"Settings of Megatron's flags, of {len(FLAGS['rows'])},", f"{len(EQUAL)}"),
        ("... that are refused in one line", f"{FLAGS['refused']}"),
        ("... that differ, that fail", f"{FLAGS['differs']}, {FLAGS['failed']}"),
        (
            f"... the largest difference of a loss among the {len(EQUAL)} ",
            f"{max(row['loss'] for row in EQUAL.values()):.1e}; "
            f"{max(row['loss'] for row in OTHERS):.1e}",
        ),
    ],
)
def test_results_of_megatron_flags(begins, expected):
    assert cell("docs/results.md", begins) == expected.replace("e-0", "e-")


@pytest.mark.parametrize(
    ("outcome", "key"),
    [
        ("equal", "equal"),
        ("refused in one line", "refused"),
        ("different", "differs"),
        ("failed", "failed"),
    ],
)
def test_outcomes_of_megatron_flags(outcome, key):
    assert cell("docs/flags.md", outcome) == str(FLAGS[key])
