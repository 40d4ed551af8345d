"""What `megatron-paradyse plan` prints: a table, the rivals of each plan; or JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from megatron_paradyse.planner.problem import Outcome
from megatron_paradyse.preview.forecast import (
    UNIFORM,
    UNLIMITED_MEMORY,
    Forecast,
    Rival,
)
from megatron_paradyse.preview.layout import (
    bytes_text,
    heading,
    seconds_text,
    table,
    timed_text,
    wrapped,
)
from megatron_paradyse.preview.peak_parts import peak_parts
from megatron_paradyse.preview.setup import Setup

ALIKE = 5e-4  # a difference that would print as 0.0%
PLAN_WIDTH = 52


def plan_report(setup: Setup, found: Sequence[Forecast]) -> str:
    """Everything but --explain."""
    parts = [heading(setup), _table(setup, found)]
    parts += [_rivals(setup, one) for one in found]
    notes = _notes(setup, found)
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _table(setup: Setup, found: Sequence[Forecast]) -> str:
    limited = setup.limited
    header = ["tokens", "seconds", "peak", *(["of budget"] if limited else []), "plan"]
    blank = [""] * (len(header) - 1)
    rows = []
    for one in found:
        share = f"{one.outcome.peak_bytes / one.problem.budget_bytes:.1%}"
        row = [
            f"{one.seq_length:,}{'' if one.profiled else '*'}",
            seconds_text(one.seconds),
            bytes_text(one.outcome.peak_bytes),
            *([share if one.outcome.fits else f"{share}!"] if limited else []),
        ]
        first, *rest = textwrap.wrap(one.outcome.plan.runs(), PLAN_WIDTH, break_on_hyphens=False)
        rows += [[*row, first], *([*blank, line] for line in rest)]
    return table(header, rows, left=[len(header) - 1])


def _rivals(setup: Setup, one: Forecast) -> str:
    lines = [f"{one.title}:"]
    if not one.outcome.fits:
        lines.append(wrapped(_nothing_fits(setup, one), indent="  "))
    elif setup.limited and not any(r.kind == UNIFORM for r in one.rivals):
        alone = len(setup.policies.costs.strategies) == 1
        lines.append(f"  no other {'strategy may run' if alone else 'single strategy fits'}")
    lines += [wrapped(rival_text(one, rival), indent="  ") for rival in one.rivals]
    if not one.rivals:
        lines.append("  no other plan is possible")
    return "\n".join(lines)


def _nothing_fits(setup: Setup, one: Forecast) -> str:
    refuses = setup.policies.settings.over_budget == "refuse"
    then = "training refuses it" if refuses else "training warns and runs this plan of least peak"
    return (
        f"no plan fits: the least peak is {bytes_text(one.outcome.exceeds_bytes)} above the "
        f"budget; {then}"
    )


def rival_text(one: Forecast, rival: Rival) -> str:
    """What the rival is, and why it lost."""
    plan = rival.outcome.plan.runs()
    titles = {
        UNIFORM: f"the best other single strategy that fits, {rival.name}",
        UNLIMITED_MEMORY: f"with unlimited memory, {plan}",
    }
    title = titles.get(rival.kind, f"the best plan without {rival.name}, {plan}")
    return f"{title}: {why_it_lost(one, rival.outcome)}"


def why_it_lost(one: Forecast, other: Outcome) -> str:
    """Slower by so many percent of the whole microbatch, or above the budget by so much."""
    speed = _speed(other.seconds + one.edge_seconds, one.seconds)
    if other.fits or not one.outcome.fits:
        more = other.peak_bytes - one.outcome.peak_bytes
        size = f"peak {bytes_text(abs(more))} {'higher' if more > 0 else 'lower'}"
        return f"{speed}, {size}" if more else speed
    joint = "and" if speed.endswith("slower") else "but"
    return f"{speed}, {joint} exceeds the budget by {bytes_text(other.exceeds_bytes)}"


def _speed(seconds: float, chosen: float) -> str:
    """A published model may predict no time at all, far beyond the profiled lengths."""
    if abs(seconds - chosen) <= ALIKE * chosen:
        return "as fast"
    word = "slower" if seconds > chosen else "faster"
    return f"{abs(seconds / chosen - 1):.1%} {word}" if chosen else word


def _notes(setup: Setup, found: Sequence[Forecast]) -> list[str]:
    notes = []
    if any(not one.profiled for one in found):
        timed = timed_text(setup.policies.costs.file.table)
        notes.append(
            f"* outside what was timed of this plan (of all: {timed}): extrapolated by the fitted "
            "model"
        )
    if any(one.kept_single(setup) for one in found):
        notes.append(
            "faster plans of several strategies lost: by these costs they must take "
            f"{setup.policies.gain:.0%} less time than one of a single strategy "
            "(--mixing-gain, in training --paradyse-mixing-gain)"
        )
    others = setup.stage.num_in_flight - 1
    if others and not setup.limited and not found[0].problem.forward_only:
        waiting = "the other microbatch" if others == 1 else f"the other {others:,} microbatches"
        notes.append(f"peaks leave out what {waiting} in flight may keep: give --memory-budget")
    if any(not one.outcome.fits for one in found):
        notes.append("! no plan fits: see above")
    notes.append("seconds: a microbatch's layers, embedding and head" + _passes(found))
    if setup.description.source != "measured":
        notes.append(f"these costs are {setup.description.source}, not measured on such ranks")
    notes += setup.policies.costs.file.warnings()
    return [wrapped(note) for note in notes]


def _passes(found: Sequence[Forecast]) -> str:
    return ", forward only" if found[0].problem.forward_only else ", forward and backward"


def plan_values(setup: Setup, found: Sequence[Forecast]) -> dict[str, Any]:
    """The same for machines; seconds and bytes."""
    d = setup.description
    return {
        "costs": setup.policies.costs.file.path,
        "source": d.source,
        "date": d.date,
        "hardware": d.hardware.name,
        "p": d.p,
        "num_layers": setup.policies.num_layers,
        "policy": setup.policies.settings.policy,
        "granularity": setup.policies.settings.granularity,
        "budget_bytes": setup.stage.budget_bytes if setup.limited else None,
        "margin": setup.stage.margin,
        "lengths": [_values(setup, one) for one in found],
    }


def _values(setup: Setup, one: Forecast) -> dict[str, Any]:
    packed = {} if one.row is None else {"documents": len(one.row.lengths)}
    if one.row is not None and one.row.groups > 1:
        packed["replicas"] = one.row.groups
    return {
        "seq_length": one.seq_length,
        **packed,
        "batch_size": one.batch_size,
        "planned_length": one.planned_length,
        "extrapolated": not one.profiled,
        **outcome_values(one.outcome),
        "seconds": one.seconds,
        "edge_seconds": one.edge_seconds,
        "peak": dataclasses.asdict(peak_parts(setup, one)),
        "rivals": [
            {"kind": rival.kind, "name": rival.name, **outcome_values(rival.outcome)}
            for rival in one.rivals
        ],
    }


def outcome_values(outcome: Outcome) -> dict[str, Any]:
    return {
        "plan": outcome.plan.runs(),
        "layer_seconds": outcome.seconds,
        "peak_bytes": outcome.peak_bytes,
        "exceeds_bytes": outcome.exceeds_bytes,
    }
