"""The drawings of docs/concepts.md: the layout, a plan, the memory of a microbatch."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from canvas import (
    ACTIVATION,
    EMPTY,
    INK,
    MUTED,
    SENT,
    WEIGHT,
    P,
    arrow,
    columns,
    label,
    middle,
    rows,
    square,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the package of this checkout, installed or not

from megatron_paradyse.plan import LayerChoice, parse_runs  # noqa: E402
from megatron_paradyse.planner.peak import walk  # noqa: E402
from megatron_paradyse.planner.problem import Choice, LayerOptions, Problem  # noqa: E402
from megatron_paradyse.report.style import styles_of  # noqa: E402
from megatron_paradyse.strategies.accounting import operation_costs  # noqa: E402
from megatron_paradyse.strategies.sizes import LayerSizes  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "dynamic_workload-cpu-2-cores.json"
LENGTHS = (48, 400, 3912, 7184, 7672, 9144)  # of the plans that are drawn
# The model that those plans are of: 4 layers, h = 256, 8 heads, 4 ranks, float32.
SIZES = partial(LayerSizes, b=1, h=256, n=8, g=8, d=32, f=1024, p=4, element_bytes=4)


def halves(choice: LayerChoice) -> tuple[str, str]:
    """The strategies of attention and MLP."""
    return choice.attention, choice.mlp


def _empty_axes(figure: Figure, limits: tuple[float, float, float, float]) -> Axes:
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(limits[0], limits[1])
    ax.set_ylim(limits[2], limits[3])
    ax.set_aspect("equal")
    ax.axis("off")
    return ax


def draw_layout() -> Figure:
    """Who holds what at a layer's edge, whichever strategy ran before or runs next."""
    figure = Figure(figsize=(9.3, 4.6), facecolor="white")
    ax = _empty_axes(figure, (-1.9, 10.6, -5.1, 1.4))
    weights = (
        (2.6, rows, "qkv\n[(n + 2g) d / p, h]"),
        (4.1, columns, "proj\n[h, n d / p]"),
        (5.6, rows, "fc1\n[f / p, h]"),
        (7.1, columns, "fc2\n[h, f / p]"),
    )
    for rank in range(P):
        y = middle(rank)
        label(ax, -0.8, y, f"rank {rank}", MUTED, ha="right")
        square(ax, 0, y, rows(rank), ACTIVATION)
        for x, parts, _ in weights:
            square(ax, x, y, parts(rank), WEIGHT)
        square(ax, 9.7, y, rows(rank), ACTIVATION)
        ax.add_patch(
            Rectangle((2.0, y - 0.44), 5.7, 0.88, fill=False, ec=MUTED, lw=0.7, ls=(0, (3, 2)))
        )
        arrow(ax, (0.5, y), (1.9, y), MUTED)
        arrow(ax, (7.8, y), (9.2, y), MUTED)
    label(ax, 0, -3.55, "activations\n[s/p, b, h]", va="top")
    label(ax, 9.7, -3.55, "activations\n[s/p, b, h]", va="top")
    for x, _, name in weights:
        label(ax, x, -3.55, name, va="top")
    label(ax, 0, 0.62, "before a layer")
    label(ax, 4.85, 0.62, "the weights of the layer: Megatron's own shards, whatever strategy runs")
    label(ax, 9.7, 0.62, "after it")
    text = (
        "A square is a whole tensor, filled is what the rank holds. Activations: height is the "
        "sequence, rank r has the r-th contiguous chunk.\nWeights: rank r has the rows (qkv, fc1) "
        "or columns (proj, fc2) that a Megatron tensor-parallel rank has. What a strategy gathers "
        "or\nmoves inside the layer is gone at its end, so the next layer may run another strategy "
        "and no tensor moves in between. p = 4."
    )
    ax.text(-1.6, -4.35, text, fontsize=7.5, color=INK, va="top", linespacing=1.3)
    return figure


def _plans() -> tuple[dict[int, Any], str]:
    """By length, from the results of benchmarks/dynamic_workload.py, and their date."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    found = {row["s"]: row["plan"] for row in (*results["rows"], *results["tail"])}
    return {length: parse_runs(found[length]) for length in LENGTHS}, results["date"]


def draw_plan() -> Figure:
    """Layers by microbatches, attention and MLP apart, in the colours of `report`."""
    plans, date = _plans()
    figure = Figure(figsize=(9.3, 4.5), facecolor="white")
    ax = _empty_axes(figure, (-1.7, 10.8, -1.65, 4.45))
    names = [name for plan in plans.values() for c in plan.layers.values() for name in halves(c)]
    styles = styles_of(sorted(set(names)))
    for column, (length, plan) in enumerate(plans.items()):
        left = column * 1.8
        label(ax, left + 0.7, -0.25, f"{length:,} tokens", fontsize=8)
        for number, choice in plan.layers.items():
            for half, name in enumerate(halves(choice)):
                style = styles[name]
                ax.add_patch(
                    Rectangle(
                        (left + 0.72 * half, number - 1 + 0.06),
                        0.68,
                        0.86,
                        fc="white" if style.recomputes else style.colour,
                        ec=style.colour,
                        hatch=style.hatch or None,
                        lw=1,
                    )
                )
        for half, name in enumerate(("attention", "MLP")):
            label(ax, left + 0.34 + 0.72 * half, 4.15, name, MUTED, fontsize=6.5)
    for number in range(1, 5):
        label(ax, -0.25, number - 0.5, f"layer {number}", MUTED, ha="right")
    handles = [
        Patch(
            facecolor="white" if style.recomputes else style.colour,
            edgecolor=style.colour,
            hatch=style.hatch,
            label=style.label,
        )
        for style in styles.values()
    ]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), frameon=False,
                  fontsize=8, bbox_to_anchor=(0.5, 0.1))  # fmt: skip
    figure.text(0.5, 0.045, "Plans under one memory budget (119 MiB a rank): 4 layers, "
                f"h = 256, 4 CPU ranks; benchmarks/dynamic_workload.py, {date}.",
                ha="center", fontsize=7.5, color=INK)  # fmt: skip
    return figure


def _choices(plan: Any, s: int) -> list[tuple[str, Choice]]:
    """The operations in the order in which they run, by the formulas of strategies.md."""
    sizes = SIZES(s=s)
    run = []
    for number, choice in plan.layers.items():
        for half, name in zip(("attention", "mlp"), halves(choice), strict=True):
            costs = operation_costs(name, half, sizes)
            numbers = (costs.kept_bytes, costs.forward_bytes, costs.backward_bytes)
            kept, forward, backward = map(int, numbers)
            run.append((f"{number} {half}", Choice(name, 0.0, kept, forward, backward)))
    return run


def draw_peak() -> Figure:
    """The walk of planner/peak.py over two plans of one length."""
    figure = Figure(figsize=(9.3, 4.3), facecolor="white", layout="constrained")
    length = LENGTHS[-1]
    plan = _plans()[0][length]
    runs = plan.runs().replace(", ", "\n")  # a line each: strategies' names are long
    plans = {"ulysses_z in every layer": parse_runs("1-4 ulysses_z"), runs: plan}
    panels = figure.subplots(1, 2, sharey=True)
    for ax, (title, plan) in zip(panels, plans.items(), strict=True):
        _peak_panel(ax, title, _choices(plan, length))
    panels[0].set_ylim(0, 1.18 * panels[0].get_ylim()[1])
    panels[0].set_ylabel(f"MiB of a rank, {length:,} tokens", fontsize=8)
    handles = [Patch(facecolor=ACTIVATION, label="kept until its backward"),
               Patch(facecolor=SENT, label="workspace of the step")]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncol=2, frameon=False, fontsize=8)
    return figure


def _peak_panel(ax: Axes, title: str, named: list[tuple[str, Choice]]) -> None:
    run = [choice for _, choice in named]
    problem = Problem({1: LayerOptions((run[0],), (run[1],))}, budget_bytes=1 << 62)
    forward, kept, tops = [], 0, []
    for choice in run:
        kept += choice.kept_bytes
        forward.append(kept)
    lives = [*forward, *reversed(forward)]
    tops = walk(problem, run)[1:-1]  # less the embedding, before and after
    del tops[len(run)]  # and the loss head
    mib = 2.0**20
    for step, (live, top) in enumerate(zip(lives, tops, strict=True)):
        ax.bar(step, live / mib, color=ACTIVATION, width=0.86)
        ax.bar(step, (top - live) / mib, bottom=live / mib, color=SENT, width=0.86)
    peak = max(tops) / mib
    ax.axhline(peak, color=INK, lw=0.8, ls=(0, (4, 2)))
    ax.text(
        len(tops) - 0.5, peak * 1.01, f"peak {peak:.0f} MiB", ha="right", va="bottom", fontsize=8
    )
    names = [name.replace("attention", "att.") for name, _ in named]
    ax.set_xticks(range(len(tops)), [*names, *reversed(names)], rotation=90, fontsize=6.5)
    ax.axvline(len(run) - 0.5, color=MUTED, lw=0.8)
    for x, text in ((len(run) / 2 - 0.5, "forward"), (1.5 * len(run) - 0.5, "backward")):
        ax.text(x, 0.96, text, transform=ax.get_xaxis_transform(), ha="center", fontsize=8,
                color=MUTED)  # fmt: skip
    ax.set_title(title, fontsize=8.5, color=INK)
    ax.tick_params(axis="y", labelsize=7.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_facecolor(EMPTY)
