"""The accuracy of the models as tables and as a figure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_paradyse.costs.accuracy import SCOPES, TIME, Errors, summarize
from megatron_paradyse.costs.description import Description
from megatron_paradyse.costs.table import BYTE_QUANTITIES
from megatron_paradyse.whole_file import check_figure, whole_file

if TYPE_CHECKING:
    from rich.table import Table

# Okabe and Ito's colours, told apart by the colour-blind; markers, so that a grey print does too.
STYLES = {"hybrid": ("#0072B2", "o"), "paper": ("#E69F00", "s")}
SMALLEST_DRAWN = 1e-5


def summary_table(errors: Sequence[Errors]) -> Table:
    """All strategies together: a row per model, quantity and scope."""
    from rich.table import Table

    table = Table(title="Relative error at lengths not fitted", header_style="bold")
    for name in ("model", "quantity", "scope"):
        table.add_column(name)
    for name in ("median", "95th percentile", "largest"):
        table.add_column(name, justify="right")
    for model, rows in summarize(errors).items():
        for kind in ("time", "memory"):
            for scope in SCOPES:
                suffix = "" if scope == SCOPES[0] else f"_{scope}"
                if f"{kind}_max{suffix}" in rows:
                    numbers = (rows[f"{kind}_{name}{suffix}"] for name in ("median", "p95", "max"))
                    table.add_row(model, kind, scope, *(f"{100 * n:.2f}%" for n in numbers))
    return table


def detail_table(errors: Sequence[Errors]) -> Table:
    """A row per strategy, operation, quantity and scope; median / 95th percentile / largest."""
    from rich.table import Table

    models = list(dict.fromkeys(e.model for e in errors))
    table = Table(title="Median / 95th percentile / largest error", header_style="bold")
    for name in ("strategy", "operation", "quantity", "scope"):
        table.add_column(name)
    for name in ("points", *models):
        table.add_column(name, justify="right")
    rows: dict[tuple[str, ...], dict[str, Errors]] = {}
    for e in errors:
        rows.setdefault((e.strategy, e.operation, e.quantity, e.scope), {})[e.model] = e
    for key, by_model in rows.items():
        points = str(max(len(e.errors) for e in by_model.values()))
        texts = (
            f"{100 * e.median:.2f} / {100 * e.p95:.2f} / {100 * e.max:.2f}%"
            for e in (by_model[model] for model in models)
        )
        table.add_row(*key, points, *texts)
    return table


def plot_accuracy(errors: Sequence[Errors], path: str, *, description: Description) -> None:
    """Draw errors by strategy and scope, time above memory, into path (.png, .svg or .pdf)."""
    check_figure(path)
    # Without pyplot: no display, no state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    names = list(dict.fromkeys(e.strategy for e in errors))
    scopes = [scope for scope in SCOPES if any(e.scope == scope for e in errors)]
    figure = Figure(figsize=(3.2 + 3 * len(scopes), 1.6 + 0.7 * len(names)), layout="constrained")
    axes = figure.subplots(2, len(scopes), sharex="row", sharey=True, squeeze=False)
    for row, (title, quantities) in enumerate((("time", (TIME,)), ("memory", BYTE_QUANTITIES))):
        for ax, scope in zip(axes[row], scopes, strict=True):
            for shift, model in zip((-0.15, 0.15), STYLES, strict=True):
                _draw(ax, errors, names, model, scope, quantities, shift)
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%"))
            where = "inside the profiled range" if scope == SCOPES[0] else f"{scope} beyond it"
            ax.set_title(f"{title}, {where}", fontsize=9)
            ax.grid(axis="x", color="0.9")
            ax.spines[["top", "right"]].set_visible(False)
        axes[row][0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0][0].set_ylim(len(names) - 0.5, -0.5)
    axes[0][0].legend(frameon=False, fontsize=8)
    for ax in axes[1]:
        ax.set_xlabel("relative error: median, bar to the largest", fontsize=8)
    d = description
    figure.supxlabel(
        f"{d.source} {d.date} on {d.hardware.num_devices} x {d.hardware.name}, p={d.p}, {d.dtype}; "
        f"errors below {100 * SMALLEST_DRAWN:g}% drawn there; "
        f"drawn {datetime.date.today().isoformat()}",
        fontsize=7,
        color="0.35",
    )
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=150)


def _draw(ax, errors, names, model, scope, quantities, shift) -> None:
    colour, marker = STYLES[model]
    for position, name in enumerate(names):
        found = [
            error
            for e in errors
            if (e.model, e.scope, e.strategy) == (model, scope, name) and e.quantity in quantities
            for error in e.errors
        ]
        if not found:
            continue
        middle, largest = np.maximum((np.median(found), max(found)), SMALLEST_DRAWN)
        label = model if position == 0 else None
        ax.plot([middle], [position + shift], marker, color=colour, markersize=5, label=label)
        ax.plot([middle, largest], [position + shift] * 2, color=colour, linewidth=1.5)
