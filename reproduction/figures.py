"""Figures of results/, drawn from its CSV files.

Figure 2: panels of model and distribution; in sorted order cumulative time against the length of
the sequence, shuffled against the number of documents. A cross ends a curve that ran out of memory.
"""

from __future__ import annotations

from pathlib import Path

from megatron_paradyse.report.style import (
    COLOURS,
    INK,
    Look,
    grid,
    make_figure,
    plain_log_axis,
    save_png,
    token_axis,
)
from megatron_paradyse.units import format_count
from reproduction.curves import Curve, curves
from reproduction.names import (
    AS_PUBLISHED,
    DISTRIBUTIONS,
    FORMS,
    MODELS,
    PARADYSE,
    POLICIES,
    SHUFFLED,
    SIMULATED,
    SORTED,
    title,
)
from reproduction.tables import Table, read_table

OWN = {PARADYSE: (INK, "-", 2.0), AS_PUBLISHED: ("#56B4E9", (0, (5, 2)), 1.6)}
PANEL_HEIGHT = 2.5


def draw_all(folder: Path) -> list[Path]:
    """Every figure whose CSV file is there."""
    drawn = []
    for form in FORMS:
        table = read_table(folder / f"figure2-{form}.csv")
        if table is None:
            continue
        for order, name in ((SORTED, f"figure2-{form}"), (SHUFFLED, f"figure2-shuffled-{form}")):
            path = folder / f"{name}.png"
            if draw_figure2(table, order, path):
                drawn.append(path)
    return drawn


def draw_figure2(table: Table, order: str, path: Path) -> bool:
    """Whether there was anything to draw in that order."""
    panels = {
        (model, distribution): found
        for model in MODELS
        for distribution in DISTRIBUTIONS
        if (found := curves(table, model, distribution, order))
    }
    models = [m for m in MODELS if any(key[0] == m for key in panels)]
    distributions = [d for d in DISTRIBUTIONS if any(key[1] == d for key in panels)]
    if not panels:
        return False

    def draw(figure) -> None:
        axes = figure.subplots(len(models), len(distributions), squeeze=False)
        for row, model in enumerate(models):
            for column, distribution in enumerate(distributions):
                found = panels.get((model, distribution), {})
                _panel(axes[row][column], model, distribution, found, order)
        for one in axes[:, 0]:
            one.set_ylabel("cumulative time (s)")
        for one in axes[-1]:
            one.set_xlabel("length of the sequence (tokens)" if order == SORTED else "documents")
        _legend(figure, panels)

    height = PANEL_HEIGHT * len(models) + 1.1
    save_png(make_figure(draw, Look(), height=height, footer=_footer(table, order)), str(path))
    return True


def _panel(axes, model: str, distribution: str, found: dict[str, Curve], order: str) -> None:
    axes.set_title(f"{title(model)}, {title(distribution)}")
    if not found:
        axes.set_axis_off()
        return
    ended: list[str] = []
    crosses: list[tuple[int, float, str]] = []
    for policy in POLICIES:
        if policy in found and found[policy].tokens:
            curve = found[policy]
            x = curve.tokens if order == SORTED else range(1, len(curve.tokens) + 1)
            axes.plot(x, curve.seconds, **_line(policy))
            if curve.failed_tokens is not None:
                ended.append(policy)
                crosses.append((x[-1], curve.seconds[-1], policy))
        elif policy in found:
            ended.append(policy)
    axes.set_yscale("log")
    if order == SORTED:
        axes.set_xscale("log", base=2)
    for end, y, policy in crosses:
        axes.plot(end, y, "x", color=_line(policy)["color"], ms=8, mew=2, zorder=5, clip_on=False)
    if order == SORTED:
        token_axis(axes.xaxis)
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
    plain_log_axis(axes.yaxis)
    grid(axes)
    lines = [_end_words(found[policy], order) for policy in ended]
    if lines:
        axes.text(
            0.985,
            0.03,
            "\n".join(["out of memory:", *lines]),
            transform=axes.transAxes,
            ha="right",
            va="bottom",
            fontsize=6.5,
        )


def _end_words(curve: Curve, order: str) -> str:
    name = title(curve.policy)
    if order == SORTED:
        reached = f"after {format_count(curve.tokens[-1])}" if curve.tokens else "at once"
        return f"{name} {reached}"
    return f"{name} at document {len(curve.tokens) + 1}"


def _line(policy: str) -> dict:
    if policy in OWN:
        colour, style, width = OWN[policy]
        return {"color": colour, "linestyle": style, "linewidth": width, "zorder": 4}
    colour, marker = COLOURS[policy]
    marks = {"marker": marker, "markevery": 0.12, "markersize": 3.5}
    return {"color": colour, "linestyle": "-", "linewidth": 1.1, **marks}


def _legend(figure, panels) -> None:
    from matplotlib.lines import Line2D

    drawn = [p for p in POLICIES if any(p in found for found in panels.values())]
    handles = [Line2D([], [], label=title(policy), **_line(policy)) for policy in drawn]
    cross = Line2D([], [], linestyle="", marker="x", ms=8, mew=2, color=INK, label="out of memory")
    figure.legend(handles=[*handles, cross], loc="outside upper center", ncols=4, fontsize=8)


def _footer(table: Table, order: str) -> str:
    orders = {
        SORTED: "documents sorted from short to long, as the paper trained",
        SHUFFLED: "documents shuffled, as people train: a training ends at its first document "
        "that does not fit",
    }
    words = f"{table.origin}. Lengths drawn from the published distributions; {orders[order]}. "
    words += "Forward and backward; batch size 1."
    if table.origin.startswith(SIMULATED):
        words += " Single strategies and ParaDySe with the head in tiles, ParaDySe as published "
        words += "with Megatron's own head."
    return words
