"""The length histogram as a figure, beside the paper's two distributions."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from megatron_paradyse.data.distributions import DISTRIBUTIONS, PAPER, bucket_labels
from megatron_paradyse.data.lengths import LengthSummary
from megatron_paradyse.whole_file import check_figure, whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by the colour-blind; hatches, so that a grey print does too.
COLOURS = ("#0072B2", "#E69F00", "#009E73")
HATCHES = ("", "//", "..")


def plot_lengths(summary: LengthSummary, path: str, *, label: str, source: str) -> None:
    """Draw shares of sequences per bucket into path (.png, .svg or .pdf), all or nothing.

    label names the data set in the legend; source says what it is (measured, synthetic).
    """
    check_figure(path)
    import matplotlib

    plain = matplotlib.rc_context({"text.parse_math": False})  # a file's name is no mathematics
    with plain, whole_file(path) as temporary:
        _drawn(summary, label, source).savefig(temporary, dpi=150)


def _drawn(summary: LengthSummary, label: str, source: str) -> Figure:
    # Without pyplot: no display, no state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.add_subplot()
    rows = [(label, summary.percent)]
    rows += [(f"{row.title} (paper)", row.percent) for row in DISTRIBUTIONS.values()]
    width = 0.8 / len(rows)
    for i, (name, percent) in enumerate(rows):
        positions = [bucket - 0.4 + (i + 0.5) * width for bucket in range(len(percent))]
        bars = axes.bar(
            positions,
            percent,
            width,
            label=name,
            color=COLOURS[i],
            hatch=HATCHES[i],
            edgecolor="white",
        )
        axes.bar_label(bars, fmt=_bar_text, fontsize=7, padding=1)
    axes.set_xticks(range(len(summary.percent)), bucket_labels(summary.scale))
    scaled = f", edges x {summary.scale:g}" if summary.scale != 1 else ""
    axes.set_xlabel(f"sequence length (tokens, K = 1024{scaled})")
    axes.set_ylabel("share of sequences (%)")
    axes.set_title(
        f"{summary.num_sequences:,} sequences, {summary.num_tokens:,} tokens, "
        f"longest {summary.max_tokens:,}",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    today = datetime.date.today().isoformat()
    figure.supxlabel(f"{source}; paper: {PAPER}; drawn {today}", fontsize=7, color="0.35")
    return figure


def _bar_text(percent: float) -> str:
    return f"{percent:.1f}" if percent else ""
