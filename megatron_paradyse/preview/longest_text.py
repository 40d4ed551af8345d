"""What `megatron-paradyse max-length` prints."""

from __future__ import annotations

from typing import Any

from megatron_paradyse.preview.layout import (
    bytes_text,
    heading,
    seconds_text,
    table,
    timed_text,
    wrapped,
)
from megatron_paradyse.preview.longest import Limit, Longest
from megatron_paradyse.preview.measured_text import Measured, measured_report, measured_values
from megatron_paradyse.preview.peak_parts import host_bytes
from megatron_paradyse.preview.plan_text import outcome_values
from megatron_paradyse.preview.setup import Setup
from megatron_paradyse.strategies import offloads


def longest_report(setup: Setup, found: Longest, measured: Measured | None) -> str:
    parts = [heading(setup), _table(found), _paradyse(setup, found), *_notes(setup, found)]
    parts += [measured_report(measured)] if measured is not None else []
    return "\n\n".join(part for part in parts if part)


def _table(found: Longest) -> str:
    ours, *others = found.limits
    rows = [_row("ParaDySe (optimal)", ours, ours.tokens)]
    rows += [_row(limit.strategy, limit, ours.tokens) for limit in others]
    header = ["strategy on all layers", "longest, tokens", "of ParaDySe's", "seconds of layers"]
    return table(header, rows, left=[0])


def _row(name: str, limit: Limit, ours: int) -> list[str]:
    if limit.outcome is None:
        return [name, "none fits", "-", "-"]
    share = f"{limit.tokens / ours:.1%}"
    return [
        name,
        f"{limit.tokens:,}{_mark(limit) or ' '}",
        share,
        seconds_text(limit.outcome.seconds),
    ]


def _mark(limit: Limit) -> str:
    return "*" if limit.extrapolated else ""


def _paradyse(setup: Setup, found: Longest) -> str:
    at = found.forecast
    if at is None:
        return (
            f"Not even {found.alignment:,} tokens fit: give a larger budget, or profile on more "
            "ranks."
        )
    lines = [
        f"ParaDySe at {at.seq_length:,} tokens, {found.batch_size} per microbatch: "
        f"{at.outcome.plan.runs()}: {seconds_text(at.seconds)} with embedding and head, peak "
        f"{bytes_text(at.outcome.peak_bytes)} of {bytes_text(at.problem.budget_bytes)}."
    ]
    waiting = host_bytes(setup, at)
    if waiting:
        lines.append(f"{bytes_text(waiting)} of host memory a rank hold inputs of its layers.")
    kinds: list[tuple[dict[str, bool], str]] = [({}, "single strategy")]
    if any(offloads(limit.strategy) for limit in found.single):
        kinds.append(({"offload": False}, "one without +offload"))
    kinds.append(({"recompute": False}, "one that does not recompute"))
    for without, words in kinds:
        best, ratio = found.best(**without), found.ratio(**without)
        if best is not None and ratio is not None:
            lines.append(f"It reaches {ratio:.3f} times as far as the best {words}, {_name(best)}.")
    wide = found.wide
    if wide is not None and wide.outcome is not None:
        lines.append(
            f"Packed, over {found.spread} replicas (--paradyse-spread {found.spread}), a document "
            f"may have {wide.tokens:,}{_mark(wide)} tokens: {wide.outcome.plan.runs()}, peak "
            f"{bytes_text(wide.outcome.peak_bytes)}."
        )
    return wrapped(" ".join(lines))


def _name(limit: Limit) -> str:
    return f"{limit.strategy} ({limit.tokens:,})"


def _notes(setup: Setup, found: Longest) -> list[str]:
    notes = [f"Lengths are multiples of {found.alignment:,} tokens."]
    limits = [found.paradyse, *found.single, *([found.wide] if found.wide else [])]
    if any(limit.extrapolated for limit in limits):
        timed = timed_text(setup.policies.costs.file.table)
        notes.append(
            f"* beyond what was timed of it (of all: {timed}): extrapolated by the fitted model."
        )
    if setup.description.model.position_embedding == "learned" and not setup.static_given:
        notes.append(
            "Learned positions: their table grows with --max-position-embeddings on every rank; "
            "counted is that of the costs. For a longer one give --static-memory, as training says "
            "it at its start."
        )
    if setup.description.source != "measured":
        notes.append(f"These costs are {setup.description.source}, not measured on such ranks.")
    notes += setup.policies.costs.file.warnings()
    return ["\n".join(wrapped(note) for note in notes)]


def longest_values(
    setup: Setup, found: Longest, measured: Measured | None = None
) -> dict[str, Any]:
    """The same for machines; seconds and bytes. "measured" only where it was."""
    d = setup.description
    values = {} if measured is None else {"measured": measured_values(measured)}
    if found.wide is not None:
        values["spread"] = {"replicas": found.spread, **_values(found.wide)}
    return values | {
        "costs": setup.policies.costs.file.path,
        "source": d.source,
        "date": d.date,
        "hardware": d.hardware.name,
        "p": d.p,
        "num_layers": setup.policies.num_layers,
        "batch_size": found.batch_size,
        "alignment": found.alignment,
        "budget_bytes": setup.stage.budget_bytes,
        "margin": setup.stage.margin,
        "static_bytes": setup.stage.static_bytes,
        "paradyse": _values(found.paradyse),
        "paradyse_host_bytes": host_bytes(setup, found.forecast) if found.forecast else 0,
        "paradyse_seconds": found.forecast.seconds if found.forecast else None,
        "single": [_values(limit) for limit in found.single],
        "ratio_to_best_single": found.ratio(),
        "ratio_to_best_single_without_offload": found.ratio(offload=False),
        "ratio_to_best_single_without_recompute": found.ratio(recompute=False),
    }


def _values(limit: Limit) -> dict[str, Any]:
    values: dict[str, Any] = {
        "strategy": limit.strategy,
        "tokens": limit.tokens,
        "extrapolated": limit.extrapolated,
        "profiled_to": limit.profiled,
    }
    return values | (outcome_values(limit.outcome) if limit.outcome is not None else {})
