"""How figures look, and how one becomes a PNG file and an SVG that follows the page's colours."""

from __future__ import annotations

import math
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from megatron_paradyse.strategies import base_name, offloads, recomputes
from megatron_paradyse.units import format_count
from megatron_paradyse.whole_file import whole_file

# Okabe and Ito's colours, told apart by the colour-blind; markers and hatches for a grey print.
COLOURS = {
    "megatron_ts": ("#0072B2", "o"),
    "ulysses_z": ("#E69F00", "s"),
    "megatron_cz": ("#009E73", "^"),
    "colossal_z": ("#CC79A7", "D"),
    "metp": ("#D55E00", "v"),
    "local_z": ("#56B4E9", "P"),
}
OTHERS = (("#999933", "X"), ("#8C6BB1", "*"), ("#A6761D", "<"))
OURS, ACCENT = "#0072B2", "#D55E00"
INK = "#222221"  # becomes the page's own colour of text
MUTED = "#808080"  # readable on white and on black
RECOMPUTE_HATCH, OFFLOAD_HATCH = "////", "xxxx"
MOST_LABEL_CHARACTERS = 28
DPI = 150
# A legend of many strategies in the width of a page.
TIGHT: Any = {"fontsize": 7.5, "columnspacing": 1.0, "handlelength": 1.8, "handletextpad": 0.5}
_PAGE_STYLE: Any = {
    "text.parse_math": False,  # a name in a trace is never mathematics
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.7,
}


@dataclass(frozen=True)
class Style:
    """Of one strategy; with +recompute it is hatched, dashed and its markers are hollow.

    With +offload it is crosshatched and dotted.
    """

    label: str
    colour: str
    marker: str
    recomputes: bool
    offloads: bool = False

    @property
    def hatch(self) -> str:
        if self.offloads:
            return OFFLOAD_HATCH
        return RECOMPUTE_HATCH if self.recomputes else ""

    @property
    def line(self) -> dict[str, Any]:
        dashes = (0, (1, 2)) if self.offloads else (0, (4, 2)) if self.recomputes else "-"
        return {"color": self.colour, "linestyle": dashes}

    @property
    def points(self) -> dict[str, Any]:
        face = "none" if self.recomputes else self.colour
        return {"marker": self.marker, "markerfacecolor": face, "markeredgecolor": self.colour}


def styles_of(names: Sequence[str]) -> dict[str, Style]:
    """A style for each name; the package's strategies look the same in every figure."""
    styles: dict[str, Style] = {}
    unknown: list[str] = []
    for name in names:
        base = base_name(name)
        if base not in COLOURS and base not in unknown:
            unknown.append(base)
        colour, marker = (
            COLOURS[base] if base in COLOURS else OTHERS[unknown.index(base) % len(OTHERS)]
        )
        styles[name] = Style(short(name), colour, marker, recomputes(name), offloads(name))
    return styles


@dataclass(frozen=True)
class Look:
    """Where a figure goes: a wide page, or a phone's."""

    narrow: bool = False

    @property
    def width(self) -> float:
        return 3.9 if self.narrow else 8.0

    @property
    def columns(self) -> int:
        """Of panels."""
        return 1 if self.narrow else 2


def make_figure(draw: Callable[[Any], None], look: Look, *, height: float, footer: str):
    """A figure that `draw` filled, with whose numbers it shows below."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Without pyplot: no display, no state.
    with rc_context(_PAGE_STYLE):
        figure = Figure(figsize=(look.width, height), layout="constrained", facecolor="none")
        draw(figure)
        lines = textwrap.wrap(footer, 68 if look.narrow else 142)
        figure.supxlabel("\n".join(lines), fontsize=6.5, color=MUTED)
    return figure


def save_png(figure, path: str) -> None:
    """All or nothing, on white."""
    with whole_file(path) as temporary, _quiet():
        figure.savefig(temporary, dpi=DPI, facecolor="white")


def to_svg(figure, name: str) -> str:
    """An element for a page: text stays text, ink has the page's colour, ids are name's own."""
    from matplotlib import rc_context

    stream = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), _quiet():
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height|version)="[^"]*"', "", head)
    # Ids of clips, markers and hatches depend on name; those of two figures may not meet.
    rest = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", rest)
    return f"{head}>{rest}".replace(INK, "currentColor").strip()


def _quiet():
    """Names may hold letters that the font lacks: boxes then, without a warning for each."""
    return warnings.catch_warnings(action="ignore")


def short(name: str) -> str:
    if len(name) <= MOST_LABEL_CHARACTERS:
        return name
    return f"{name[: MOST_LABEL_CHARACTERS - 1]}…"


def grid(axes) -> None:
    axes.grid(color=MUTED, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def token_axis(axis) -> None:
    """Tokens on a log axis: 1K, 2K, 4K."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    low, high = axis.get_view_interval()
    octaves = max(1, math.log2(max(high, 2) / max(low, 1)))
    axis.set_major_locator(LogLocator(base=2 ** max(1, math.ceil(octaves / 8))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: format_count(x)))
    axis.set_minor_formatter(NullFormatter())


def plain_log_axis(axis) -> None:
    """Numbers on a log axis without powers: 0.01, 0.1, 1."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    few = high / max(low, 1e-300) < 300
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if few else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def byte_unit(largest: float) -> tuple[float, str]:
    """The divisor and the name of the unit in which so many bytes read well."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return 1024.0**power, name
    return 1.0, "bytes"
