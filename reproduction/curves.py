"""Curves of figure 2 from its rows, measured or simulated alike."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from reproduction.names import AS_PUBLISHED, SHUFFLED, SORTED
from reproduction.tables import Table


@dataclass(frozen=True)
class Curve:
    """One policy on the documents in their order: cumulative seconds after each.

    failed_tokens: of the document at which it ran out of memory, where it ended.
    """

    policy: str
    tokens: list[int]
    seconds: list[float]
    failed_tokens: int | None = None


def curve(policy: str, documents: list[tuple[int, float | None]]) -> Curve:
    """documents: tokens and seconds, None where it does not fit: the training ends there."""
    done: list[tuple[int, float]] = []
    failed = None
    for tokens, seconds in documents:
        if seconds is None:
            failed = tokens
            break
        done.append((tokens, seconds))
    sums = list(accumulate(seconds for _, seconds in done))
    return Curve(policy, [tokens for tokens, _ in done], sums, failed)


def curves(table: Table, model: str, distribution: str, order: str) -> dict[str, Curve]:
    """By policy, in the file's order; empty where the file has no such panel."""
    found: dict[str, list[tuple[int, float | None]]] = {}
    for row in sorted(
        table.where(model=model, distribution=distribution, order=order),
        key=lambda row: int(row["document"]),
    ):
        found.setdefault(row["policy"], []).append(_document(row))
    if order == SHUFFLED:
        found = {**_permuted(table, model, distribution, found), **found}
    return {policy: curve(policy, documents) for policy, documents in found.items()}


def _permuted(table: Table, model: str, distribution: str, found) -> dict:
    """Policies without shuffled rows: the seconds of their sorted ones, in the order of another."""
    order = [tokens for tokens, _ in found.get(AS_PUBLISHED, [])]
    by_policy: dict[str, dict[int, float | None]] = {}
    for row in table.where(model=model, distribution=distribution, order=SORTED):
        tokens, seconds = _document(row)
        by_policy.setdefault(row["policy"], {})[tokens] = seconds
    return {
        policy: [(tokens, seconds[tokens]) for tokens in order]
        for policy, seconds in by_policy.items()
        if policy not in found and order and set(order) <= seconds.keys()
    }


def _document(row: dict[str, str]) -> tuple[int, float | None]:
    return int(row["tokens"]), float(row["seconds"]) if row["seconds"] else None
