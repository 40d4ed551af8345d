"""The headline comparisons of one panel, measured or simulated: against the four strategies that
the paper compares with, and against the best of all."""

from __future__ import annotations

from dataclasses import dataclass

from reproduction.curves import Curve, curves
from reproduction.names import AS_PUBLISHED, FIXED, PARADYSE, SORTED
from reproduction.tables import Table

PAPERS = tuple(name for name in FIXED if name != "colossal_z")  # the paper left ColossalZ out


@dataclass(frozen=True)
class Compared:
    """One framework against one single strategy: shares, at the documents that both train."""

    against: str
    reduction: float | None
    extension: float | None
    limit: int
    limit_against: int
    documents: int = 0
    in_data: float | None = None  # the extension by the longest documents that trained


def simulated(headlines: Table, model: str, distribution: str, framework: str) -> list[Compared]:
    """Rows of headlines-simulated.csv; limits are the longest sequences that fit."""
    return [
        Compared(
            row["against"],
            _number(row["reduction"]),
            _number(row["extension"]),
            int(row["limit"]),
            int(row["limit_against"]),
            int(row["documents"]),
            _extension(int(row["longest"]), int(row["longest_against"])),
        )
        for row in headlines.where(model=model, distribution=distribution, framework=framework)
    ]


def measured(figure2: Table, model: str, distribution: str, framework: str) -> list[Compared]:
    """From figure2-measured.csv; limits are the longest documents that trained."""
    found = curves(figure2, model, distribution, SORTED)
    if framework not in found:
        return []
    return [
        compare(found[framework], found[name])
        for name in found
        if name not in (PARADYSE, AS_PUBLISHED)
    ]


def compare(ours: Curve, other: Curve) -> Compared:
    count = min(len(ours.seconds), len(other.seconds))
    limit, against = (max(c.tokens, default=0) for c in (ours, other))
    reduction = 1 - ours.seconds[count - 1] / other.seconds[count - 1] if count else None
    extension = _extension(limit, against) if other.failed_tokens is not None else None
    return Compared(other.policy, reduction, extension, limit, against, count, extension)


def most(rows: list[Compared], what: str, among=PAPERS) -> Compared | None:
    """Where the reduction or extension is largest: the paper's "up to"."""
    found = [row for row in rows if row.against in among and getattr(row, what) is not None]
    return max(found, key=lambda row: getattr(row, what), default=None)


def least(rows: list[Compared], what: str, *, recompute: bool) -> Compared | None:
    """Against the best single strategy; for time, of those that reach furthest in the data."""
    found = [row for row in rows if getattr(row, what) is not None]
    found = [row for row in found if recompute or "+" not in row.against]
    if what == "reduction" and found:
        furthest = max(row.documents for row in found)
        found = [row for row in found if row.documents == furthest]
    return min(found, key=lambda row: getattr(row, what), default=None)


def _extension(tokens: int, against: int) -> float | None:
    return tokens / against - 1 if against else None


def _number(text: str) -> float | None:
    return float(text) if text else None
