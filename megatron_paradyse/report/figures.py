"""The figures of a report: when each can be drawn, what it is called, what it says in words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from megatron_paradyse.report import cost_figures, plan_figures, run_figures
from megatron_paradyse.report.content import THIS_RUN, Content
from megatron_paradyse.report.estimates import NO_LOAD
from megatron_paradyse.report.style import Look, make_figure, save_png, short, to_svg
from megatron_paradyse.units import counted, format_count

WIDE, NARROW = Look(), Look(narrow=True)
NEEDS_COSTS = "give the fitted cost file as --costs"


@dataclass(frozen=True)
class Kind:
    """One kind of figure. missing: why it cannot be drawn, "" if it can; heights in inches."""

    name: str
    title: str
    draw: Callable[..., None]
    words: Callable[[Content], str]
    missing: Callable[[Content], str]
    heights: tuple[float, float] = (4.2, 4.4)  # wide, narrow
    taller: Callable[[Content], float] = lambda _: 1.0  # times these heights


@dataclass(frozen=True)
class Drawn:
    """A figure for the page: SVG elements for a wide and a narrow one, or why there is none."""

    name: str
    title: str
    words: str
    wide: str = ""
    narrow: str = ""
    missing: str = ""


def draw_all(content: Content, folder: str) -> list[Drawn]:
    """Every figure that the content allows, also as folder/NAME.png."""
    return [_draw(kind, content, folder) for kind in KINDS]


def _draw(kind: Kind, content: Content, folder: str) -> Drawn:
    missing = kind.missing(content)
    if missing:
        return Drawn(kind.name, kind.title, "", missing=missing)
    svgs = []
    for look, height in zip((WIDE, NARROW), kind.heights, strict=True):
        figure = make_figure(
            functools.partial(kind.draw, content=content, look=look),
            look,
            height=height * kind.taller(content),
            footer=content.source(),
        )
        if look is WIDE:
            save_png(figure, f"{folder}/{kind.name}.png")
        svgs.append(to_svg(figure, f"{kind.name}-{'narrow' if look.narrow else 'wide'}"))
    return Drawn(kind.name, kind.title, kind.words(content), *svgs)


def _plan_words(content: Content) -> str:
    columns, shown = plan_figures.plans_by_length(content, plan_figures.MOST_COLUMNS)
    if not columns:
        return "No plan is known."
    ran = [sorted({c.attention for c in shown[i].values()}) for i in range(len(columns))]
    first, last = (", ".join(short(name) for name in ran[i][:3]) for i in (0, -1))
    said = (
        f"At the shortest lengths, up to {format_count(columns[0])} tokens, attention runs "
        f"{first}; at the longest, {format_count(columns[-1])}, {last}"
    )
    if all(names == ran[0] for names in ran):
        said = f"At every length attention runs {first}"
    return (
        f"{said}. Where a length ran several plans, the most frequent is shown; hatched strategies "
        "recompute, crosshatched ones offload."
    )


def _share_words(content: Content) -> str:
    names = content.strategies[:3]
    parts = [
        f"{short(name)} ran {content.layer_shares[name]:.0%} of the layers and took "
        f"{content.time_shares[name]:.0%} of their time"
        for name in names
    ]
    return f"{'; '.join(parts)}. Half a layer counts as half of its layer's time."


def _cumulative_words(content: Content) -> str:
    alone = [curve for name, curve in content.cumulative.items() if name not in THIS_RUN]
    unfit = sum(curve.oom_length is not None for curve in alone)
    said = f"{unfit} of {len(alone)} single strategies do not fit every microbatch"
    if not unfit:
        said = "Every single strategy fits every microbatch"
    if content.best_fixed is not None:
        said += f"; the fastest {'that does ' if unfit else ''}is {short(content.best_fixed.name)}"
    return (
        f"{said}. Curves of single strategies are estimates by the cost model, to be compared "
        "with this run's prediction; each ends where the next peak is predicted over the budget."
    )


def _error_words(content: Content) -> str:
    said = f"Predicted seconds are off by {content.time_error or 0:.1%} at the median"
    if content.peak_error is not None:
        said += f", predicted peaks by {content.peak_error:.1%}"
    return f"{said}. On the dashed line both are alike."


def _memory_words(content: Content) -> str:
    budget = content.run.memory_budget_bytes if content.run else None
    failed = content.num_out_of_memory
    said = "The trace tells no budget" if budget is None else f"Budget {budget / 2**20:,.0f} MiB"
    return (
        f"{said}; {counted(failed, 'record')} of memory that ran out. "
        "Peaks are of one rank, everything alive included; before the optimizer has made its "
        "states, in its first step, they lie below their prediction."
    )


def _length_words(content: Content) -> str:
    longest = max(trace.longest for trace in content.traces)
    said = f"{counted(content.lengths.total(), 'sequence')}, the longest of {longest:,} tokens"
    packed = any(trace.has_rows for trace in content.traces)
    left_out = " A trace has no lengths of the documents of packed rows." if packed else ""
    return f"{said}, padding included.{left_out}"


def _curve_words(content: Content) -> str:
    assert content.costs is not None
    d = content.costs.table.description
    return (
        f"Points are {d.source}, lines the fitted model; p={d.p}, {d.dtype}, {d.hardware.name}, "
        f"{d.date}. Dashed lines and hollow points recompute."
    )


def _needs_microbatches(content: Content) -> str:
    known = any(trace.summary.microbatches for trace in content.traces)
    return "" if known else "the trace holds no microbatch"


def _needs_costs(content: Content) -> str:
    if content.costs is None:
        return NEEDS_COSTS
    if content.num_packed and not content.predicted_seconds:
        return NO_LOAD
    return _needs_microbatches(content)


def _needs_single_sequences(content: Content) -> str:
    if content.lengths:
        return ""
    packed_only = "the trace holds packed rows only, and not the lengths of their documents"
    return _needs_microbatches(content) or packed_only


def _needs_measurements(content: Content) -> str:
    known = content.costs is not None and content.costs.table.measurements
    return "" if known else NEEDS_COSTS


def _needs_predictions(content: Content) -> str:
    if cost_figures.has_predictions(content):
        return ""
    return "the trace holds no predictions: train with --paradyse-policy optimal or heuristic"


def _needs_peaks(content: Content) -> str:
    if run_figures.has_peaks(content):
        return ""
    return "the trace holds no peaks: on a CPU they are counted with --paradyse-memory-budget"


KINDS = (
    Kind(
        "plans",
        "Which plan runs at which length",
        plan_figures.draw_plan_map,
        _plan_words,
        _needs_microbatches,
    ),
    Kind(
        "shares",
        "Share of the layers and of their time",
        plan_figures.draw_shares,
        _share_words,
        _needs_microbatches,
    ),
    Kind(
        "cumulative",
        "Time against sequence length, beside each strategy alone",
        run_figures.draw_cumulative,
        _cumulative_words,
        _needs_costs,
        (5.0, 6.4),
    ),
    Kind(
        "predictions",
        "Predicted against measured",
        cost_figures.draw_predictions,
        _error_words,
        _needs_predictions,
        (4.6, 8.4),
    ),
    Kind(
        "memory",
        "Memory against the budget",
        run_figures.draw_memory,
        _memory_words,
        _needs_peaks,
    ),
    Kind(
        "lengths",
        "Lengths of the sequences",
        plan_figures.draw_lengths,
        _length_words,
        _needs_single_sequences,
    ),
    Kind(
        "costs",
        "What each strategy costs",
        cost_figures.draw_cost_curves,
        _curve_words,
        _needs_measurements,
        (7.4, 12.5),
        lambda content: len(cost_figures.halves_drawn(content)) / 2,
    ),
)
