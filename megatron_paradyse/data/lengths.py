"""How long the sequences of a data set are: counts, shares and quantiles in the paper's buckets.

A document is one sequence, as in training, also where the index has several of it (sentences).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_paradyse.data.distributions import (
    DISTRIBUTIONS,
    PAPER,
    bucket_labels,
    scaled_edges,
)
from megatron_paradyse.data.index import DatasetIndex
from megatron_paradyse.units import format_count

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class LengthSummary:
    """Lengths in tokens of the sequences of a data set; buckets are the paper's times scale."""

    prefix: str
    scale: float
    num_sequences: int
    num_documents: int
    num_tokens: int
    min_tokens: int
    median_tokens: float
    mean_tokens: float
    p99_tokens: float
    max_tokens: int
    bucket_edges: tuple[float, ...]  # lower edges
    bucket_sequences: tuple[int, ...]
    bucket_tokens: tuple[int, ...]

    @property
    def percent(self) -> tuple[float, ...]:
        """Percentage of the sequences in each bucket, to compare with Distribution.percent."""
        return tuple(100 * count / self.num_sequences for count in self.bucket_sequences)

    @property
    def token_percent(self) -> tuple[float, ...]:
        """Percentage of the tokens in each bucket."""
        return tuple(100 * tokens / max(self.num_tokens, 1) for tokens in self.bucket_tokens)


def summarize(index: DatasetIndex, scale: float = 1.0) -> LengthSummary:
    """Count lengths in the paper's buckets, whose edges are multiplied by scale."""
    lengths = index.document_lengths
    edges = scaled_edges(scale)
    bucket = np.searchsorted(edges, lengths, side="right") - 1
    sequences = np.bincount(bucket, minlength=len(edges))
    tokens = np.array([lengths[bucket == i].sum(dtype=np.int64) for i in range(len(edges))])
    return LengthSummary(
        prefix=index.prefix,
        scale=scale,
        num_sequences=len(lengths),
        num_documents=index.num_documents,
        num_tokens=int(tokens.sum()),
        min_tokens=int(lengths.min()),
        median_tokens=float(np.median(lengths)),
        mean_tokens=float(lengths.mean()),
        p99_tokens=float(np.percentile(lengths, 99)),
        max_tokens=int(lengths.max()),
        bucket_edges=tuple(edges.tolist()),
        bucket_sequences=tuple(sequences.tolist()),
        bucket_tokens=tuple(tokens.tolist()),
    )


def to_json_values(summary: LengthSummary) -> dict[str, Any]:
    """The summary, its percentages and the paper's rows, for --json."""
    return {
        **dataclasses.asdict(summary),
        "bucket_labels": bucket_labels(summary.scale),
        "percent_of_sequences": summary.percent,
        "percent_of_tokens": summary.token_percent,
        "published": {
            row.title: {
                "tokenizer": row.tokenizer,
                "percent_of_sequences": row.percent,
                "max_tokens": row.max_tokens,
            }
            for row in DISTRIBUTIONS.values()
        },
        "published_source": PAPER,
    }


def length_table(summary: LengthSummary) -> Table:
    """The histogram as a table, beside the paper's rows."""
    from rich.table import Table

    table = Table(title=None, header_style="bold")
    table.add_column("tokens", justify="right", no_wrap=True)
    for title in ("sequences", "share", "of tokens"):
        table.add_column(title, justify="right")
    for row in DISTRIBUTIONS.values():
        table.add_column(f"{row.title}*", justify="right")
    rows = zip(
        bucket_labels(summary.scale),
        summary.bucket_sequences,
        summary.percent,
        summary.token_percent,
        *(row.percent for row in DISTRIBUTIONS.values()),
        strict=True,
    )
    for label, sequences, *percents in rows:
        table.add_row(label, f"{sequences:,}", *(f"{percent:.1f}%" for percent in percents))
    return table


def summary_lines(summary: LengthSummary) -> list[str]:
    """What the table does not say, in two lines and the table's footnote."""
    quantiles = {
        "min": summary.min_tokens,
        "median": summary.median_tokens,
        "mean": summary.mean_tokens,
        "p99": summary.p99_tokens,
        "max": summary.max_tokens,
    }
    maxima = ", ".join(
        f"{row.title} {row.tokenizer}, max {format_count(row.max_tokens)}"
        for row in DISTRIBUTIONS.values()
    )
    scaled = f"; edges x {summary.scale:g}" if summary.scale != 1 else ""
    return [
        f"{summary.num_sequences:,} sequences, {summary.num_tokens:,} tokens",
        "tokens: " + ", ".join(f"{name} {_tokens(n)}" for name, n in quantiles.items()),
        f"* {PAPER} ({maxima}). K = 1024{scaled}",
    ]


def _tokens(number: float) -> str:
    """With tenths where they are a part worth reading: a mean of 6.5, and of 16,121."""
    return f"{number:,.0f}" if number == int(number) or number >= 100 else f"{number:.1f}"
