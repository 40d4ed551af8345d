"""The longest sequences as bars."""

from __future__ import annotations

import datetime

from megatron_paradyse.preview.layout import bytes_text
from megatron_paradyse.preview.longest import Limit, Longest
from megatron_paradyse.preview.setup import Setup
from megatron_paradyse.strategies import offloads, recomputes
from megatron_paradyse.whole_file import check_figure, whole_file

# Okabe and Ito's colours, told apart by the colour-blind; hatches, so that a grey print does too.
PARADYSE, PLAIN, RECOMPUTED = ("#D55E00", ""), ("#0072B2", ""), ("#56B4E9", "//")
OFFLOADED = ("#009E73", "xx")


def draw_longest(setup: Setup, found: Longest, path: str) -> None:
    """Draw the limits, the longest on top, into path (.png, .svg or .pdf), all or nothing."""
    check_figure(path)
    # Without pyplot: no display, no state.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    limits = [found.paradyse, *sorted(found.single, key=lambda limit: -limit.tokens)]
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
    names = ["ParaDySe", *(limit.strategy for limit in limits[1:])]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * max(limit.tokens for limit in limits) / unit or 1)
    axes.set_xlabel(f"longest sequence ({symbol} tokens; {symbol} = {unit:,})")
    axes.set_title(_title(setup, found), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [("ParaDySe", PARADYSE), ("one strategy", PLAIN), ("with +recompute", RECOMPUTED)]
    if any(offloads(limit.strategy) for limit in found.single):
        kinds.append(("with +offload", OFFLOADED))
    axes.legend(
        handles=[Patch(facecolor=c, hatch=h, edgecolor="white", label=k) for k, (c, h) in kinds],
        frameon=False,
        fontsize=8,
        loc="lower right",
    )
    figure.supxlabel(_source(setup, limits), fontsize=7, color="0.35")
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=150)


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


def _source(setup: Setup, limits: list[Limit]) -> str:
    d = setup.description
    beyond = "; * extrapolated" if any(limit.extrapolated for limit in limits) else ""
    return (
        f"predicted from costs {d.source} {d.date}, {d.p} x {d.hardware.name}, {d.dtype}, "
        f"{d.attention_mask}{beyond}; drawn {datetime.date.today().isoformat()}"
    )
