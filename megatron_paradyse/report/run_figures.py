"""Figures of a whole run: memory against the budget, time against length."""

from __future__ import annotations

from megatron_paradyse.report.content import THIS_RUN, Content, Curve
from megatron_paradyse.report.cost_figures import MOST_CURVES, thinned
from megatron_paradyse.report.style import (
    ACCENT,
    INK,
    MUTED,
    OURS,
    TIGHT,
    Look,
    byte_unit,
    grid,
    plain_log_axis,
    styles_of,
    token_axis,
)

POINTS_OF_LINE = 250  # each with its marker


def has_peaks(content: Content) -> bool:
    return any(
        row.peak_bytes or row.predicted_peak_bytes
        for trace in content.traces
        for row in trace.microbatches.rows
    ) or bool(content.num_out_of_memory)


def draw_memory(figure, content: Content, look: Look) -> None:
    """The largest peak of each iteration, measured and predicted, and the budget."""
    measured: dict[int, int] = {}
    predicted: dict[int, int] = {}
    for trace in content.traces:
        for row in trace.microbatches.rows:
            for found, value in ((measured, row.peak_bytes), (predicted, row.predicted_peak_bytes)):
                if value:
                    found[row.iteration] = max(found.get(row.iteration, 0), value)
    failed = [oom.microbatch for trace in content.traces for oom in trace.out_of_memory]
    budgets = [(a, b, budget) for a, b, budget in content.main.budgets if a and budget is not None]
    largest = [*measured.values(), *predicted.values(), *(m.peak_bytes or 0 for m in failed)]
    unit, name = byte_unit(max([*largest, *(budget for *_, budget in budgets)], default=1))
    axes = figure.add_subplot()
    series = (
        ("measured", measured, OURS, "o", OURS),
        ("predicted", predicted, ACCENT, "^", "none"),
    )
    for label, found, colour, marker, face in series:
        if found:
            shown = thinned(sorted(found))
            style = {"color": colour, "marker": marker, "markerfacecolor": face, "markersize": 4}
            values = [found[i] / unit for i in shown]
            axes.plot(shown, values, label=label, linestyle="none", **style)
    if budgets:  # each of its own start: a later one may have run the same iterations again
        lines = [(budget / unit, a - 0.5, b + 0.5) for a, b, budget in budgets]
        axes.hlines(*zip(*lines, strict=True), color=INK, linestyle="--", label="budget")
    points = [(m.iteration, m.peak_bytes / unit) for m in failed if m.peak_bytes]
    if points:
        style = {"color": INK, "marker": "X", "markersize": 8, "linestyle": "none"}
        axes.plot(*zip(*points, strict=True), label="out of memory", **style)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("iteration")
    axes.set_ylabel(f"largest peak memory of a microbatch ({name})")
    grid(axes)
    figure.legend(loc="outside upper center", ncols=2 if look.narrow else 4)


def draw_cumulative(figure, content: Content, look: Look) -> None:
    """Time of the layers over microbatches from short to long, beside each strategy alone."""
    curves = content.cumulative
    names = [name for name in curves if name not in THIS_RUN]
    styles = styles_of(names[:MOST_CURVES])
    axes = figure.add_subplot()
    for name, style in styles.items():
        curve = curves[name]
        look_of = {**style.line, **style.points, "markersize": 3, "linewidth": 1.2}
        if curve.lengths:
            axes.plot(*_line_of(curve), label=style.label, **look_of)
        if curve.lengths and curve.oom_length is not None:
            end = (curve.lengths[-1], curve.seconds[-1])
            axes.plot(*end, marker="X", markersize=8, color=style.colour)
    for name, dashes, face in (("measured", "-", INK), ("predicted", ":", "none")):
        if name in curves and curves[name].lengths:
            line = _line_of(curves[name])
            alone = {"marker": "o" if len(line[0]) == 1 else "", "markerfacecolor": face}
            looks = {"color": INK, "linewidth": 2.4, "linestyle": dashes, **alone}
            axes.plot(*line, label=f"this run, {name}", **looks)
    if any(curves[name].oom_length is not None for name in styles):
        cross = {"marker": "X", "markersize": 8, "color": MUTED, "linestyle": "none"}
        axes.plot([], [], label="OOM: the next is over the budget", **cross)
    axes.set_xscale("log")
    axes.set_yscale("log")
    token_axis(axes.xaxis)
    plain_log_axis(axes.yaxis)
    axes.set_xlabel("microbatches by sequence length (tokens, K = 1024)")
    axes.set_ylabel("cumulative time of the layers (s, log scale)")
    grid(axes)
    figure.legend(
        title="single strategies: estimates by the cost model",
        title_fontsize=8,
        loc="outside upper center",
        ncols=2 if look.narrow else 4,
        **TIGHT,
    )


def _line_of(curve: Curve) -> tuple[list[int], list[float]]:
    """Lengths and seconds, of many points some, and always the last."""
    *others, last = range(len(curve.lengths))
    shown = [*thinned(others, POINTS_OF_LINE), last]
    return [curve.lengths[i] for i in shown], [curve.seconds[i] for i in shown]
