"""The documents of a panel: lengths drawn from a published distribution, in two orders."""

from __future__ import annotations

import numpy as np

from megatron_paradyse.data.distributions import draw_lengths
from megatron_paradyse.data.order import short_to_long, shuffled
from reproduction.names import DISTRIBUTIONS, SORTED

COUNT = 400  # of a simulated panel: as many as its CSV file has room for
SEED, SHUFFLE_SEED = 2026, 2027


def document_lengths(distribution: str, count: int = COUNT) -> np.ndarray:
    """Tokens of each document, as drawn; never above the published maximum."""
    random = np.random.default_rng([SEED, DISTRIBUTIONS.index(distribution)])
    return draw_lengths(distribution, count, rng=random)


def in_order(lengths: np.ndarray, order: str) -> np.ndarray:
    """The lengths as a training would meet them: sorted as the paper's, or shuffled."""
    if order == SORTED:
        return lengths[short_to_long(lengths, 0)]
    return lengths[shuffled(lengths, 0, seed=SHUFFLE_SEED)]
