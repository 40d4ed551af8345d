"""The paper's two published length distributions, and lengths drawn like them.

Source: Ou, Liang, Qiao, Han, Liu, "ParaDySe: A Parallel-Strategy Switching Framework for Dynamic
Sequence Lengths in Transformer", AAAI-26, arXiv 2511.13198. K = 1024 tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_paradyse.errors import UserError
from megatron_paradyse.units import KIBI, format_count

PAPER = "ParaDySe, AAAI-26, arXiv 2511.13198"
# Buckets [edge, next edge): 0-4K, 4K-8K, ..., 64K-128K, 128K+.
BUCKET_EDGES = (0, 4 * KIBI, 8 * KIBI, 16 * KIBI, 32 * KIBI, 64 * KIBI, 128 * KIBI)
# The paper says that lengths start at tens of tokens; it publishes no minimum. Ours, for drawing.
SHORTEST_DRAWN_TOKENS = 32
LONGEST_DRAWN_TOKENS = 1 << 60  # far within int64
# A document of one token has nothing to predict.
MIN_DOCUMENT_TOKENS = 2


@dataclass(frozen=True)
class Distribution:
    """A published row: the percentage of documents in each bucket and the longest document."""

    name: str
    title: str
    tokenizer: str
    percent: tuple[float, ...]
    max_tokens: int

    @property
    def probabilities(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Shares that sum to 1; the row of GRCh38 is published with a sum of 99.1%."""
        shares = np.array(self.percent)
        return shares / shares.sum()


GITHUBCODE = Distribution(
    "githubcode",
    "GitHubCode",
    "GPT-2 BPE",
    (65.7, 14.5, 9.8, 5.1, 2.7, 1.1, 1.1),
    309 * KIBI,
)
GRCH38 = Distribution(
    "grch38",
    "GRCh38",
    "3-mer",
    (3.5, 26.4, 28.7, 21.2, 11.9, 5.5, 1.9),
    624 * KIBI,
)
DISTRIBUTIONS = {row.name: row for row in (GITHUBCODE, GRCH38)}


def scaled_edges(scale: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Lower edges of the buckets in tokens, times scale; the last bucket has no upper edge."""
    return np.array(BUCKET_EDGES) * scale


def bucket_labels(scale: float = 1.0) -> list[str]:
    """The buckets as the paper writes them: 0-4K, ..., 128K+."""
    edges = [format_count(edge) for edge in scaled_edges(scale)]
    return [f"{low}-{high}" for low, high in itertools.pairwise(edges)] + [f"{edges[-1]}+"]


def draw_lengths(
    distribution: str | Distribution,
    count: int,
    scale: float = 1.0,
    rng: np.random.Generator | int | None = None,
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw `count` document lengths in tokens like a published distribution, times scale.

    A bucket is drawn with its published share, then a length log-uniformly inside it: the first
    bucket from 32 tokens, the last up to the published maximum (316,416 and 638,976 tokens), all
    times scale. A length is at least 2 tokens. rng: a generator, or a seed.

    Raises UserError for an unknown distribution, a negative count, or a scale that is not above 0.
    """
    if isinstance(distribution, str):
        if distribution not in DISTRIBUTIONS:
            known = ", ".join(DISTRIBUTIONS)
            raise UserError(f"unknown distribution {distribution!r}: choose one of {known}")
        distribution = DISTRIBUTIONS[distribution]
    if count < 0 or not 0 < scale < float("inf"):
        raise UserError(f"lengths need count >= 0 and scale > 0, got {count} and {scale}")
    longest = distribution.max_tokens * scale
    if longest > LONGEST_DRAWN_TOKENS:
        raise UserError(
            f"a scale of {scale:g} makes documents of {longest:.3g} tokens: give a smaller one"
        )
    generator = np.random.default_rng(rng)
    low = scaled_edges(scale)
    low[0] = SHORTEST_DRAWN_TOKENS * scale
    high = np.append(low[1:], (distribution.max_tokens + 1) * scale)

    bucket = generator.choice(len(low), size=count, p=distribution.probabilities)
    position = generator.random(count)
    drawn = low[bucket] * (high[bucket] / low[bucket]) ** position
    # Whole numbers n with low <= n < high, so that a length counts in the bucket it was drawn from.
    first, last = np.ceil(low), np.maximum(np.ceil(high) - 1, np.ceil(low))
    lengths = np.clip(np.floor(drawn), first[bucket], last[bucket]).astype(np.int64)
    return np.maximum(lengths, MIN_DOCUMENT_TOKENS)
