"""Figures of predictions and measurements: cost curves, errors, memory, cumulative time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from megatron_paradyse.costs.layers import ATTENTION, HALVES, MLP, half_of, layer_of
from megatron_paradyse.costs.table import MODEL, Measurement, OperationCosts
from megatron_paradyse.report.content import Content
from megatron_paradyse.report.records import Microbatch, plan_of
from megatron_paradyse.report.style import (
    MUTED,
    TIGHT,
    Look,
    byte_unit,
    grid,
    plain_log_axis,
    styles_of,
    token_axis,
)

MOST_POINTS = 1000  # drawn
CURVE_POINTS = 48
MOST_CURVES = 16


def thinned(rows: Sequence, most: int = MOST_POINTS) -> Sequence:
    return rows[:: -(-len(rows) // most)] if len(rows) > most else rows


def peak_of(costs: OperationCosts | Measurement) -> float:
    """What the operation adds to the memory at its worst moment."""
    return costs.kept_bytes + max(costs.forward_bytes, costs.backward_bytes)


def draw_cost_curves(figure, content: Content, look: Look) -> None:
    """Seconds and peak bytes of attention and MLP of one layer, measured and fitted.

    Where layers differ, of the halves of each kind.
    """
    assert content.costs is not None
    table, model = content.costs.table, content.costs.require_model()
    smallest = min(m.batch_size for m in table.measurements)
    styles = styles_of([n for n in model.strategies(ATTENTION) if n != MODEL][:MOST_CURVES])
    unit, unit_name = byte_unit(float(np.median([peak_of(m) for m in table.measurements])))
    halves = halves_drawn(content)
    drawn = [(o, t) for o in halves for t in (True, False)]
    panels = figure.subplots(len(drawn) // look.columns, look.columns, squeeze=False)
    panels = (panels.T if len(halves) == 2 else panels).ravel()
    for axes, (operation, in_time) in zip(panels, drawn, strict=True):
        for name, style in styles.items():
            _draw_points(axes, table, (name, operation, smallest), in_time, unit, style)
            if name not in model.strategies(operation):
                continue
            lengths = np.geomspace(*model.profiled_range(name, operation), CURVE_POINTS)
            costs = [model.operation(name, operation, int(s), smallest) for s in lengths]
            values = [c.time_seconds * 1e3 if in_time else peak_of(c) / unit for c in costs]
            axes.plot(lengths, values, linewidth=1.3, label=style.label, **style.line)
        axes.set_xscale("log")
        axes.set_yscale("log")
        token_axis(axes.xaxis)
        plain_log_axis(axes.yaxis)
        grid(axes)
        axes.set_title(_title(content, operation))
        axes.set_xlabel("sequence length (tokens, K = 1024)")
        axes.set_ylabel("time (ms)" if in_time else f"memory at its peak ({unit_name})")
    figure.legend(
        handles=_curve_handles(styles.values()),
        loc="outside upper center",
        ncols=2 if look.narrow else 5,
        **TIGHT,
    )


def halves_drawn(content: Content) -> list[str]:
    """The kinds of attention, then those of the MLP."""
    assert content.costs is not None
    halves = content.costs.table.description.layer_kinds.halves()
    return sorted(halves, key=lambda name: HALVES.index(half_of(name)))


def _title(content: Content, operation: str) -> str:
    """Where layers differ, with the first layer that has the half."""
    assert content.costs is not None
    others = content.costs.table.description.other_layers
    half = half_of(operation)
    name = "MLP" if half == MLP else half
    differ = half in map(half_of, others)
    whose = f"as in layer {layer_of(operation)}" if differ else "of one layer"
    return f"{name} {whose}, forward and backward"


def _draw_points(axes, table, key: tuple[str, str, int], in_time: bool, unit, style) -> None:
    found = [
        (m.seq_length, m.time_seconds * 1e3 if in_time else peak_of(m) / unit)
        for m in table.measurements
        if (m.strategy, m.operation, m.batch_size) == key and (m.is_timed if in_time else m.is_ok)
    ]
    if found:
        axes.plot(*zip(*found, strict=True), linestyle="none", markersize=4, **style.points)


def _curve_handles(styles):
    from matplotlib.lines import Line2D

    return [Line2D([], [], label=s.label, markersize=4, **s.line, **s.points) for s in styles]


def has_predictions(content: Content) -> bool:
    return any(
        row.predicted_seconds and row.seconds
        for trace in content.traces
        for row in trace.microbatches.rows
    )


def draw_predictions(figure, content: Content, look: Look) -> None:
    """Predicted against measured, seconds and peak bytes; on the line both are alike."""
    rows = [row for trace in content.traces for row in trace.microbatches.rows]
    seconds = [
        (row, row.predicted_seconds, row.seconds)
        for row in rows
        if row.predicted_seconds and row.seconds
    ]
    peaks: list[tuple[Microbatch, float, float]] = [
        (row, row.predicted_peak_bytes, row.peak_bytes)
        for row in rows
        if row.predicted_peak_bytes and row.peak_bytes
    ]
    unit, unit_name = byte_unit(max((peak for *_, peak in peaks), default=1))
    parts = [("seconds of the layers", "s", 1.0, seconds, content.time_error)]
    if peaks:
        parts.append(("peak memory of a rank", unit_name, unit, peaks, content.peak_error))
    columns = min(look.columns, len(parts))
    panels = figure.subplots(-(-len(parts) // columns), columns, squeeze=False).ravel()
    styles = styles_of(content.strategies[:MOST_CURVES])
    used: dict[str, None] = {}
    for axes, (title, name, divisor, points, error) in zip(panels, parts, strict=True):
        used |= _draw_pairs(axes, thinned(points), divisor, styles)
        axes.set_xlabel(f"measured ({name})")
        axes.set_ylabel(f"predicted ({name})")
        words = "" if error is None else f": median error {error:.1%}"
        axes.set_title(f"{title}{words}")
    handles = _curve_handles([styles[n] for n in styles if n in used])
    for handle in handles:
        handle.set_linestyle("none")
    figure.legend(
        handles=handles,
        title="runs most of the plan",
        title_fontsize=8,
        loc="outside upper center",
        ncols=2 if look.narrow else 5,
        **TIGHT,
    )


def _draw_pairs(axes, points, divisor: float, styles) -> dict[str, None]:
    """The strategies that the points were drawn as."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for row, predicted, measured in points:
        by_name.setdefault(_main_strategy(row), []).append(
            (measured / divisor, predicted / divisor)
        )
    for name, pairs in by_name.items():
        points_style = styles[name].points if name in styles else {"marker": ".", "color": MUTED}
        axes.plot(*zip(*pairs, strict=True), linestyle="none", markersize=5, **points_style)
    values = [value for pairs in by_name.values() for pair in pairs for value in pair]
    ends = (min(values) * 0.9, max(values) * 1.1)
    axes.plot(ends, ends, color=MUTED, linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(ends)
    axes.set_ylim(ends)
    plain_log_axis(axes.xaxis)
    plain_log_axis(axes.yaxis)
    grid(axes)
    return dict.fromkeys(by_name)


def _main_strategy(row: Microbatch) -> str:
    if not row.plan:
        return ""
    layers = plan_of(row.plan).layers.values()
    return Counter(n for c in layers for n in (c.attention, c.mlp)).most_common(1)[0][0]
