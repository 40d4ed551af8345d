"""Records of benchmarks, and tables of docs/."""

from __future__ import annotations

import itertools
import json
from functools import cache

from tests.documentation.markdown import ROOT


@cache
def record(benchmark: str, hardware: str = "cpu-2-cores") -> dict:
    path = ROOT / "benchmarks/results" / f"{benchmark}-{hardware}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def tables(page: str, head: str) -> list[list[list[str]]]:
    """The cells of the tables whose heads begin so, row by row, without marks of code."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("`", "").splitlines()
    found = []
    for start in (number for number, line in enumerate(lines) if line.startswith(head)):
        rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
        found.append([[cell.strip() for cell in line.strip("|").split("|")] for line in rows])
    return found


def table(page: str, head: str) -> list[list[str]]:
    """Those of the only one."""
    (found,) = tables(page, head)
    return found


def is_rounded(text: str, value: float) -> bool:
    """Whether the text is the number, to as many digits as it has."""
    number = text.strip("()%").replace(",", "")
    decimals = len(number.partition(".")[2])
    return abs(float(number) - value) <= 0.5 * 10**-decimals + 1e-9


def check(cells: list[str], values: list[float]) -> None:
    assert len(cells) == len(values)
    assert all(map(is_rounded, cells, values)), (cells, values)
