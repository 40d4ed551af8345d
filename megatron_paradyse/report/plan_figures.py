"""Figures of what ran: plans by length, shares of the strategies, lengths."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_paradyse.plan import LayerChoice
from megatron_paradyse.planner.from_file import planned_length
from megatron_paradyse.report.content import Content
from megatron_paradyse.report.records import plan_of
from megatron_paradyse.report.style import MUTED, OURS, Look, Style, grid, styles_of, token_axis
from megatron_paradyse.report.trace_file import BINS_PER_OCTAVE
from megatron_paradyse.units import format_count

MOST_COLUMNS, MOST_COLUMNS_NARROW = 36, 16
MOST_LAYERS_DRAWN = 128
LAYERS_WITH_LINES = 32
MOST_BARS = 16


def column_lengths(lengths: Sequence[int], most: int) -> list[int]:
    """The longest length of each column: every length, or as many groups, evenly by logarithm."""
    distinct = sorted(set(lengths))
    if len(distinct) <= most:
        return distinct
    low, high = math.log(distinct[0]), math.log(distinct[-1])
    groups: dict[int, int] = {}
    for length in distinct:
        groups[min(int((math.log(length) - low) / (high - low) * most), most - 1)] = length
    return list(groups.values())


def plans_by_length(
    content: Content, most: int
) -> tuple[list[int], dict[int, dict[int, LayerChoice]]]:
    """The columns' lengths, and for each column the layers of its most frequent plans."""
    rows = [row for trace in content.traces for row in trace.microbatches.rows if row.plan]
    aligned = [planned_length(row.seq_length) for row in rows]
    columns = column_lengths(aligned, most)
    counts: defaultdict[tuple[int, tuple[int, ...]], Counter[str]] = defaultdict(Counter)
    for row, length in zip(rows, aligned, strict=True):
        column = int(np.searchsorted(columns, length))
        counts[column, tuple(plan_of(row.plan).layers)][row.plan] += 1
    shown: dict[int, dict[int, LayerChoice]] = {i: {} for i in range(len(columns))}
    for (column, _), plans in counts.items():
        shown[column] |= plan_of(plans.most_common(1)[0][0]).layers
    return columns, shown


def draw_plan_map(figure, content: Content, look: Look) -> None:
    """Lengths across, layers down; the left half of a cell is attention, the right half MLP."""
    columns, shown = plans_by_length(content, MOST_COLUMNS_NARROW if look.narrow else MOST_COLUMNS)
    styles = styles_of(content.strategies)
    layers = sorted({number for plan in shown.values() for number in plan})
    step = -(-len(layers) // MOST_LAYERS_DRAWN)
    axes = figure.add_subplot()
    for column, plan in shown.items():
        for offset, operation in ((-0.46, "attention"), (0.0, "mlp")):
            _draw_half(axes, plan, operation, column + offset, styles, step)
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylim(max(layers, default=1) + 0.5, min(layers, default=1) - 0.5)
    axes.set_xticks(range(len(columns)), [format_count(length) for length in columns], rotation=90)
    axes.yaxis.get_major_locator().set_params(integer=True)
    if len(layers) <= LAYERS_WITH_LINES:
        axes.hlines([n + 0.5 for n in layers[:-1]], -0.6, len(columns) - 0.4, color="white", lw=1.2)
    axes.set_xlabel("sequence length up to (tokens, K = 1024)")
    axes.set_ylabel("layer" if step == 1 else f"layer (one in {step} drawn)")
    axes.set_title("left half of a column: attention; right half: MLP")
    used = {name for plan in shown.values() for c in plan.values() for name in (c.attention, c.mlp)}
    _legend(figure, [styles[name] for name in styles if name in used], look)


def _draw_half(axes, plan: Mapping[int, LayerChoice], operation, left, styles, step) -> None:
    """Runs of like layers, one rectangle each."""
    runs: list[tuple[str, int, int]] = []
    for number in sorted(plan)[::step]:
        name = getattr(plan[number], operation)
        if runs and runs[-1][0] == name and runs[-1][2] == number - step:
            runs[-1] = (name, runs[-1][1], number)
        else:
            runs.append((name, number, number))
    for name, first, last in runs:
        style = styles[name]
        axes.bar(
            left,
            last - first + step,
            0.46,
            bottom=first - 0.5,
            align="edge",
            color=style.colour,
            hatch=style.hatch,
            edgecolor="white",
            linewidth=0.5,
        )


def _legend(figure, styles: Sequence[Style], look: Look) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=s.colour, hatch=s.hatch, edgecolor="white", label=s.label)
        for s in styles[:MOST_BARS]
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2 if look.narrow else 5)


def draw_shares(figure, content: Content, look: Look) -> None:
    """Two bars a strategy: its share of the layers' halves, and of the layers' time."""
    names = content.strategies[:MOST_BARS]
    styles = styles_of(names)
    axes = figure.add_subplot()
    for shift, shares, alpha in (
        (-0.2, content.layer_shares, 1.0),
        (0.2, content.time_shares, 0.55),
    ):
        for i, name in enumerate(names):
            style = styles[name]
            percent = 100 * shares.get(name, 0.0)
            bar = axes.barh(
                i + shift,
                percent,
                0.38,
                color=style.colour,
                alpha=alpha,
                hatch=style.hatch,
                edgecolor="white",
            )
            what = "layers" if alpha == 1 else "time"
            size = 7.5 if len(names) <= 10 else 5.5
            axes.bar_label(bar, [f"{percent:.1f}% of {what}"], fontsize=size, padding=3)
    axes.set_yticks(range(len(names)), [styles[name].label for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    largest = max([*content.layer_shares.values(), *content.time_shares.values()])
    axes.set_xlim(0, 100 * largest * (1.6 if look.narrow else 1.25))
    axes.set_xlabel("share (%)")


def draw_lengths(figure, content: Content, look: Look) -> None:
    """Sequences by length, four bars an octave."""
    counts = content.lengths
    axes = figure.add_subplot()
    bins = sorted(counts)
    left = np.array([2.0 ** (i / BINS_PER_OCTAVE) for i in bins])
    width = left * (2 ** (1 / BINS_PER_OCTAVE) - 1)
    heights = [counts[i] for i in bins]
    axes.bar(left, heights, width, align="edge", color=OURS, edgecolor="white", linewidth=0.5)
    axes.set_xscale("log")
    axes.set_xlim(left[0] / 1.3, (left[-1] + width[-1]) * 1.3)
    token_axis(axes.xaxis)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("padded sequence length (tokens, log scale)")
    axes.set_ylabel("sequences")
    longest = max(trace.longest for trace in content.traces)
    axes.axvline(longest, color=MUTED, linestyle=":", linewidth=1)
    axes.annotate(
        f"longest {longest:,}",
        (longest, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=7.5,
    )
    grid(axes)
