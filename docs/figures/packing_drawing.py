"""The drawing of docs/packing.md: a global batch on two replicas, without wide rows and with."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from canvas import ACTIVATION, EMPTY, INK, MUTED, SENT, WEIGHT, P, label
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the package of this checkout, installed or not

from megatron_paradyse.packing.pack import Grid, Microbatch, flops_costs  # noqa: E402
from megatron_paradyse.packing.placement import place  # noqa: E402
from megatron_paradyse.packing.wide import pack_wide  # noqa: E402

LENGTHS = (48_000, 5_000, 4_200, 3_600, 3_000, 2_600, 2_200, 1_900, 1_600, 1_300, 1_000, 800)
TOKENS, REPLICAS = 9_000, 2
GRID = Grid(p=P, hidden_size=4096, num_replicas=REPLICAS, alignment=2 * P)
SHORT = (WEIGHT, "#F0C36D", "#F7DFB0")  # in turn
BAND = P + 0.8  # from replica to replica


def draw_replicas() -> Figure:
    """Time to the right; a line is a rank, its colours the documents whose tokens it has."""
    figure = Figure(figsize=(9.3, 5.4), facecolor="white")
    end = 0.0
    axes = []
    for i, (spread, title) in enumerate(
        ((1, "without --paradyse-spread"), (REPLICAS, "with --paradyse-spread 2"))
    ):
        ax = figure.add_axes((0.1, 0.55 - 0.46 * i, 0.88, 0.38))
        ax.axis("off")
        ends = _draw_step(ax, spread)
        axes.append(ax)
        end = max(end, *ends)
        label(ax, 0, 1.1, title, ha="left", weight="bold")
        for replica, stop in enumerate(ends):
            width = max(ends) - stop
            if width > 0:
                _box(ax, stop, -BAND * replica, width, P, EMPTY, hatch="////", ec=MUTED)
    for ax in axes:
        ax.set_xlim(0, 1.01 * end)
        ax.set_ylim(-BAND - P - 0.2, 1.6)
    handles = [
        Patch(facecolor=ACTIVATION, label="the document of 48,000 tokens"),
        Patch(facecolor=WEIGHT, label="others, of 800 to 5,000"),
        Patch(facecolor=EMPTY, edgecolor=MUTED, hatch="////", label="waits"),
        Patch(facecolor="white", edgecolor=SENT, label="microbatch over both replicas"),
    ]
    figure.legend(handles=handles, loc="lower center", ncol=4, frameon=False, fontsize=7.5)
    return figure


def _draw_step(ax: Axes, spread: int) -> list[float]:
    """When each replica has run its microbatches."""
    packing = pack_wide(LENGTHS, TOKENS, replace(GRID, spread=spread), flops_costs(GRID))
    ends = []
    for replica, microbatches in enumerate(packing.replicas):
        label(ax, -0.01, -BAND * replica - P / 2, f"replica {replica}, \n{P} ranks ", ha="right")
        start = 0.0
        for made in microbatches:
            _draw_microbatch(ax, made, start, replica)
            start += made.seconds
        ends.append(start)
    return ends


def _draw_microbatch(ax: Axes, made: Microbatch, start: float, replica: int) -> None:
    """Its ranks' documents side by side, by their tokens; white where a rank has padding."""
    lengths = [LENGTHS[number] for number in made.documents]
    row = made.row or place(lengths, P, causal=True, alignment=2 * P)
    first = replica * P if row.groups > 1 else 0
    for line in range(P):
        x = start
        for number, begin, stop in row.pieces[first + line]:
            width = made.seconds * (stop - begin) * row.p / row.seq_length
            document = made.documents[number]
            colour = ACTIVATION if document == 0 else SHORT[document % len(SHORT)]
            _box(ax, x, -BAND * replica - line, width, 1, colour)
            x += width
    wide = row.groups > 1
    outline = {"ec": SENT if wide else INK, "lw": 1.6 if wide else 0.8}
    _box(ax, start, -BAND * replica, made.seconds, P, "none", **outline)


def _box(ax: Axes, x: float, top: float, width: float, height: float, colour: str, **style) -> None:
    given = {"ec": "white", "lw": 0.4, **style}
    ax.add_patch(Rectangle((x, top - height), width, height, facecolor=colour, **given))
