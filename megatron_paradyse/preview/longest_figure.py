"""The longest sequences as bars."""

from __future__ import annotations

import datetime

from megatron_paradyse.preview.layout import bytes_text
from megatron_paradyse.preview.longest import Limit, Longest
from megatron_paradyse.preview.measured_text import Measured
from megatron_paradyse.preview.setup import Setup
from megatron_paradyse.strategies import offloads, recomputes
from megatron_paradyse.whole_file import check_figure, whole_file

# Okabe and Ito's colours, told apart by the colour-blind; hatches, so that a grey print does too.
PARADYSE, PLAIN, RECOMPUTED = ("#D55E00", ""), ("#0072B2", ""), ("#56B4E9", "//")
OFFLOADED = ("#009E73", "xx")


def draw_longest(setup: Setup, found: Longest, path: str, measured: Measured | None) -> None:
    """Draw the limits, the longest on top, into path (.png, .svg or .pdf), all or nothing.

    Measured ones are marked on the bars of the predicted ones.
    """
    check_figure(path)
    # Without pyplot: no display, no state.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    limits = found.limits
    unit, symbol = (1 << 20, "M") if limits[0].tokens >= 1 << 20 else (1 << 10, "K")
    figure = Figure(figsize=(8.6, 1.9 + 0.33 * len(limits)), layout="constrained")
    axes = figure.add_subplot()
    for row, limit in enumerate(limits):
        colour, hatch = _style(row, limit)
        value = limit.tokens / unit
        axes.barh(row, value, 0.72, color=colour, hatch=hatch, edgecolor="white")
        mark = "*" if limit.extrapolated else ""
        text = f" {value:.3g}{symbol}{mark}" if limit.tokens else " none fits"
        axes.text(value, row, text, va="center", fontsize=8)
    marks = _measured_marks(limits, measured, unit)
    if marks:
        axes.plot(*marks, "|", color="black", markersize=13, markeredgewidth=2, zorder=3)
    names = [limit.strategy for limit in limits]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * max(limit.tokens for limit in limits) / unit or 1)
    axes.set_xlabel(f"longest sequence ({symbol} tokens; {symbol} = {unit:,})")
    axes.set_title(_title(setup, found), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [("ParaDySe", PARADYSE), ("one strategy", PLAIN), ("with +recompute", RECOMPUTED)]
    if any(offloads(limit.strategy) for limit in found.single):
        kinds.append(("with +offload", OFFLOADED))
    handles: list = [Patch(facecolor=c, hatch=h, edgecolor="white", label=k) for k, (c, h) in kinds]
    if marks:
        handles += [
            Line2D([], [], color="black", marker="|", ls="", ms=11, mew=2, label="measured")
        ]
    axes.legend(
        handles=handles,
        frameon=False,
        fontsize=8,
        loc="lower right",
    )
    figure.supxlabel(_source(setup, limits, measured), fontsize=7, color="0.35")
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=150)


def _measured_marks(
    limits: list[Limit], measured: Measured | None, unit: int
) -> tuple[list[float], list[int]] | None:
    """Places of the measured limits on the bars."""
    if measured is None:
        return None
    tokens = {limit.strategy: limit.tokens for limit in measured[1]}
    rows = [row for row, limit in enumerate(limits) if tokens.get(limit.strategy)]
    return [tokens[limits[row].strategy] / unit for row in rows], rows


def _style(row: int, limit: Limit) -> tuple[str, str]:
    if row == 0:
        return PARADYSE
    if offloads(limit.strategy):
        return OFFLOADED
    return RECOMPUTED if recomputes(limit.strategy) else PLAIN


def _title(setup: Setup, found: Longest) -> str:
    shape = setup.description.model
    return (
        f"{setup.policies.num_layers:,} layers, h {shape.hidden_size:,}, p {setup.description.p}, "
        f"b {found.batch_size}: {bytes_text(setup.stage.budget_bytes)} a rank, of which "
        f"{bytes_text(setup.stage.static_bytes)} static"
    )


def _source(setup: Setup, limits: list[Limit], measured: Measured | None) -> str:
    d = setup.description
    beyond = "; * extrapolated" if any(limit.extrapolated for limit in limits) else ""
    run = ""
    if measured is not None:
        about = measured[0]
        device = f"one {about.hardware} for a rank" if about.stand_in else about.hardware
        run = f"\nmeasured on {device}, torch {about.torch}"
    return (
        f"predicted from costs {d.source} {d.date}, {d.p} x {d.hardware.name}, {d.dtype}, "
        f"{d.attention_mask}{beyond}; drawn {datetime.date.today().isoformat()}{run}"
    )
