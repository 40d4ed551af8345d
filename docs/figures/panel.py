"""A panel: what ranks hold and send, rank by rank, left to right.

It is a list of steps. A tensor shows what each rank holds; between two of them stands what makes
the second of the first: a computation, with the weights that it uses, or communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from canvas import (
    ACTIVATION,
    INK,
    MUTED,
    SENT,
    SIDE,
    WEIGHT,
    WHOLE,
    P,
    arrow,
    label,
    middle,
    ring,
    rows,
    square,
)
from matplotlib.axes import Axes

TOP, BOTTOM = 0.62, -(P - 1) - 0.52
SMALL = 0.36  # side of a weight's square between tensors


@dataclass(frozen=True)
class Tensor:
    """parts(rank): what the rank holds; partial: sums that other ranks' must be added to."""

    name: str
    parts: Any
    partial: bool = False


@dataclass(frozen=True)
class Compute:
    """weights: None, "shard" (the rank's own) or "gathered" (all of them, by all_gather)."""

    name: str
    weights: str | None = None


@dataclass(frozen=True)
class Send:
    """how: "all" (each rank to each), "swap" (rank r and p-1-r) or "ring"."""

    name: str
    how: str


def draw_panel(ax: Axes, title: str, steps: list, backward: str) -> None:
    """Steps alternate between Tensor and Compute or Send."""
    x = 0.0
    for step in steps:
        if isinstance(step, Tensor):
            _tensor(ax, x, step)
            x += SIDE / 2
        else:
            width = 1.55
            _between(ax, x + 0.06, x + width - 0.06, step)
            x += width + SIDE / 2
    for rank in range(P):
        label(ax, -0.62, middle(rank), f"rank {rank}", MUTED, ha="right", fontsize=7)
    finish_panel(ax, title, backward)


def finish_panel(ax: Axes, title: str, backward: str) -> None:
    """Title, the line about the backward, and the limits that all panels share."""
    ax.text(-1.35, TOP + 0.7, title, fontsize=9, weight="bold", color=INK, va="center")
    ax.text(-1.35, BOTTOM - 0.75, f"Backward: {backward}", fontsize=7.5, color=INK, va="top")
    ax.set_xlim(-1.4, 12.4)
    ax.set_ylim(BOTTOM - 1.3, TOP + 0.95)
    ax.set_aspect("equal")
    ax.axis("off")


def _tensor(ax: Axes, x: float, step: Tensor) -> None:
    for rank in range(P):
        hatch = "////" if step.partial else None
        square(ax, x, middle(rank), step.parts(rank), ACTIVATION, hatch=hatch)
    label(ax, x, BOTTOM - 0.02, step.name, va="top", fontsize=7)


def _between(ax: Axes, left: float, right: float, step: Compute | Send) -> None:
    center = (left + right) / 2
    gathered = isinstance(step, Compute) and step.weights == "gathered"
    colour = SENT if gathered or isinstance(step, Send) else INK
    label(ax, center, TOP + 0.12, step.name, colour)
    if isinstance(step, Send):
        _sending(ax, left, right, step.how)
        return
    for rank in range(P):
        arrow(ax, (left, middle(rank)), (right, middle(rank)), MUTED)
    if step.weights is None:
        return
    if gathered:  # all weights are gathered along the ranks
        ends = ((center, middle(0) + 0.3), (center, middle(P - 1) - 0.3))
        arrow(ax, *ends, SENT, head="<|-|>")
    for rank in range(P):
        parts = WHOLE if gathered else rows(rank)
        square(ax, center, middle(rank), parts, WEIGHT, side=SMALL)


def _sending(ax: Axes, left: float, right: float, how: str) -> None:
    center = (left + right) / 2
    for rank in range(P):
        if how == "all":
            for other in range(P):
                arrow(ax, (left, middle(rank)), (right, middle(other)), SENT, lw=0.45, size=4.5)
        elif how == "swap":
            arrow(ax, (left, middle(rank)), (right, middle(P - 1 - rank)), SENT)
            arrow(ax, (left, middle(rank)), (right, middle(rank)), MUTED, lw=0.6, size=5)
        else:
            arrow(ax, (left, middle(rank)), (right, middle(rank)), MUTED)
    if how == "ring":
        ring(ax, center)
