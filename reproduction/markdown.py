"""Tables and numbers of RESULTS.md."""

from __future__ import annotations

from collections.abc import Sequence

NOT_RUN = "not run"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}%"


def tokens(count: float | str | None) -> str:
    return "-" if count in (None, "") else f"{int(float(count)):,}"


def seconds(value: float | str | None) -> str:
    if value in (None, ""):
        return "-"
    number = float(value)
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
