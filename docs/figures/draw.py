"""Draws the figures of docs/concepts.md, docs/packing.md and docs/strategies.md.

    python docs/figures/draw.py [--png] [FOLDER]

Everything in them follows from the code: megatron_paradyse/strategies/ says who holds and sends
what, planner/peak.py walks the memory. FOLDER is where the SVG files go, docs/figures by default;
with --png it gets PNG files too, to look at.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from io import StringIO
from pathlib import Path

from canvas import ACTIVATION, INK, KV, MUTED, SENT, WEIGHT
from concept_drawings import draw_layout, draw_peak, draw_plan
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from packing_drawing import draw_replicas
from strategy_drawings import DRAWINGS


def draw_strategy(name: str) -> Figure:
    """Attention above, MLP below, the legend at the bottom."""
    figure = Figure(figsize=(9.3, 8.9), facecolor="white")
    attention = figure.add_axes((0.0, 0.53, 1.0, 0.46))
    mlp = figure.add_axes((0.0, 0.065, 1.0, 0.46))
    DRAWINGS[name](attention, mlp)
    handles = [
        Patch(facecolor=ACTIVATION, label="activation that a rank holds"),
        Patch(facecolor="white", edgecolor=ACTIVATION, hatch="////", label="partial sums"),
        Patch(facecolor=WEIGHT, label="weight"),
        Line2D([], [], color=SENT, marker=">", markersize=4, label="sent between ranks"),
        Line2D([], [], color=KV, marker=">", markersize=4, label="k, v round a ring"),
        Line2D([], [], color=MUTED, marker=">", markersize=4, label="on the rank"),
    ]
    figure.legend(handles=handles, loc="lower center", ncol=6, frameon=False, fontsize=7.5,
                  bbox_to_anchor=(0.5, 0.022))  # fmt: skip
    figure.text(0.5, 0.012, "A square is a whole tensor: its height is the sequence (of a weight, "
                "the ranks' shards), its width hidden size, heads or features. p = 4.",
                ha="center", fontsize=7.5, color=INK)  # fmt: skip
    return figure


def as_svg(figure: Figure, title: str) -> str:
    """As matplotlib writes it, with one decimal, styles as classes, and no groups of one."""
    stream = StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Title": title})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r' clip-path="[^"]*"|; stroke-linejoin: miter|; stroke-linecap: round', "", text)
    text = re.sub(r"-?\d+\.\d{2,}", lambda match: f"{float(match[0]):.1f}", text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    text = re.sub(r"(?<=[\dz])\n(?=[LQCMz\"])", "", text)
    text = re.sub(r'<g id="[^"]*">\n(<(?:path|text) [^\n]*>)\n</g>', r"\1", text)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    return _with_classes(text)


def _with_classes(text: str) -> str:
    """Each style of more than one element is written once, in the style sheet."""
    counts = Counter(re.findall(r' style="([^"]*)"', text))
    names = {style: f"c{i}" for i, style in enumerate(s for s, n in counts.items() if n > 1)}
    for style, name in names.items():
        text = text.replace(f' style="{style}"', f' class="{name}"')
    rules = "".join(f".{name}{{{style}}}" for style, name in names.items())
    return text.replace("</style>", f"{rules}</style>")


def main(folder: Path, *, png: bool) -> None:
    with rc_context(
        {
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": "megatron_paradyse",
            "hatch.linewidth": 0.5,
        }
    ):
        figures = {f"strategy-{name}": draw_strategy(name) for name in DRAWINGS}
        figures |= {"layout": draw_layout(), "plan": draw_plan(), "peak": draw_peak()}
        figures["replicas"] = draw_replicas()
        for name, figure in figures.items():
            (folder / f"{name}.svg").write_text(as_svg(figure, name), encoding="utf-8")
            if png:
                figure.savefig(folder / f"{name}.png", dpi=110)


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--png"]
    main(Path(given[0]) if given else Path(__file__).parent, png="--png" in sys.argv)
