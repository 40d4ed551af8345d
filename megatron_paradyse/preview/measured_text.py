"""Measured limits beside the predicted ones, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_paradyse.preview.layout import table, wrapped
from megatron_paradyse.preview.longest import PARADYSE
from megatron_paradyse.preview.measured import About, MeasuredLimit
from megatron_paradyse.strategies import recomputes

Measured = tuple[About, Sequence[MeasuredLimit]]


def measured_report(measured: Measured) -> str:
    about, limits = measured
    header = ["measured", "predicted", "longest that fits", "shortest that does not", "off by"]
    rows = [_row(limit) for limit in limits]
    return "\n\n".join([table(header, rows, left=[0]), _notes(about, limits)])


def _row(limit: MeasuredLimit) -> list[str]:
    error = limit.error
    return [
        limit.strategy,
        f"{limit.predicted:,}" if limit.predicted else "none",
        f"{limit.tokens:,}" if limit.tokens else "none",
        f"{limit.above:,}" if limit.above is not None else limit.why,
        "-" if error is None else f"{error:+.1%}",
    ]


def _notes(about: About, limits: Sequence[MeasuredLimit]) -> str:
    lines = []
    ratios = _ratios(limits)
    for words, (name, ratio) in ratios.items():
        lines.append(f"ParaDySe reaches {ratio:.3f} times as far as the best {words}, {name}.")
    ranks = f"{about.ranks} ranks of {about.hardware}"
    if about.stand_in:
        ranks = f"one {about.hardware} in the place of a rank of {about.ranks}"
    lines.append(
        f"Whole iterations on {ranks}, torch {about.torch}, allocator {about.allocator}. A "
        "sequence fits where all of its iteration did, without a margin."
    )
    return wrapped(" ".join(lines))


def _ratios(limits: Sequence[MeasuredLimit]) -> dict[str, tuple[str, float]]:
    """In words of what: the best of them, and ParaDySe's limit over its."""
    ours = next((limit for limit in limits if limit.strategy == PARADYSE), None)
    single = [limit for limit in limits if limit.strategy != PARADYSE and limit.tokens]
    found = {}
    for words, some in (
        ("single strategy", single),
        ("one that does not recompute", [x for x in single if not recomputes(x.strategy)]),
    ):
        if ours is not None and ours.tokens and some:
            best = max(some, key=lambda limit: limit.tokens)
            found[words] = best.strategy, ours.tokens / best.tokens
    return found


def measured_values(measured: Measured) -> dict[str, Any]:
    about, limits = measured
    return {
        "about": asdict(about),
        "limits": [{**asdict(limit), "error": limit.error} for limit in limits],
        "ratios": {words: ratio for words, (_, ratio) in _ratios(limits).items()},
    }
