"""What the drawings share: colours, the rank's part of a tensor, arrows between ranks.

A tensor is a square whose height is the sequence (of a weight: its shards) and whose width is the
hidden size, heads or features. The part that a rank holds is filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

P = 4  # ranks
SIDE, PITCH = 0.78, 1.0  # of a tensor's square; from rank to rank
# Okabe and Ito's colours, told apart by the colour-blind; all readable on white.
ACTIVATION, WEIGHT, SENT, KV = "#0072B2", "#E69F00", "#D55E00", "#009E73"
INK, MUTED, EMPTY = "#222222", "#707070", "#F2F2F2"
WHOLE = ((0.0, 0.0, 1.0, 1.0),)

Part = tuple[float, float, float, float]  # left, top, width, height, as shares of the square


def rows(rank: int) -> tuple[Part, ...]:
    """The rank's chunk of the sequence, all heads."""
    return ((0.0, rank / P, 1.0, 1 / P),)


def columns(rank: int) -> tuple[Part, ...]:
    """All of the sequence, the rank's heads."""
    return ((rank / P, 0.0, 1 / P, 1.0),)


def half_rows(rank: int) -> tuple[Part, ...]:
    """The first half of chunk r and the second half of chunk p-1-r: what causal rings balance."""
    return tuple((0.0, half / (2 * P), 1.0, 1 / (2 * P)) for half in half_chunks(rank))


def half_chunks(rank: int) -> tuple[int, int]:
    """Of 2 p half chunks, the two that a rank holds after swap_halves."""
    return 2 * rank, 2 * (P - 1 - rank) + 1


def middle(rank: int) -> float:
    """The height of a rank's lane."""
    return -rank * PITCH


def square(ax: Axes, x: float, y: float, parts: Sequence[Part], colour: str, **style: Any) -> None:
    """A tensor with its middle at (x, y); style: side, hatch (partial sums), text."""
    side = style.get("side", SIDE)
    left, top = x - side / 2, y + side / 2
    ax.add_patch(Rectangle((left, y - side / 2), side, side, fc=EMPTY, ec="none"))
    for part_left, part_top, width, height in parts:
        hatch = style.get("hatch")
        ax.add_patch(
            Rectangle(
                (left + part_left * side, top - (part_top + height) * side),
                width * side,
                height * side,
                fc="white" if hatch else colour,
                ec=colour,
                hatch=hatch,
                lw=0.6,
            )
        )
    ax.add_patch(Rectangle((left, y - side / 2), side, side, fill=False, ec=MUTED, lw=0.6))
    if style.get("text"):
        ax.text(x, y, style["text"], ha="center", va="center", fontsize=7, color=INK)


def arrow(ax: Axes, start: tuple, end: tuple, colour: str, **style: Any) -> None:
    """From start to end."""
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle=style.get("head", "-|>"),
            mutation_scale=style.get("size", 7),
            color=colour,
            lw=style.get("lw", 0.9),
            shrinkA=0,
            shrinkB=0,
        )
    )


def ring(ax: Axes, x: float) -> None:
    """k and v hop from each rank to the next, and from the last to the first."""
    for rank in range(P - 1):
        arrow(ax, (x, middle(rank) - 0.16), (x, middle(rank + 1) + 0.16), KV)
    arrow(ax, (x + 0.13, middle(P - 1) - 0.05), (x + 0.13, middle(0) + 0.05), KV)


def label(ax: Axes, x: float, y: float, text: str, colour: str = INK, **style: Any) -> None:
    """Centred text, its first line at y when va is "top"."""
    ax.text(
        x,
        y,
        text,
        ha=style.get("ha", "center"),
        va=style.get("va", "center"),
        fontsize=style.get("fontsize", 7.5),
        color=colour,
        weight=style.get("weight", "normal"),
        linespacing=1.15,
    )
