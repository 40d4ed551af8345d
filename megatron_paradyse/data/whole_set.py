"""A validation set of which every evaluation reads all, each sample once (--full-validation)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from megatron_paradyse.data.loader import Samples

UNLEARNT = np.array([~0, ~0])  # one input, neither of which nor from which anything is predicted


class OneEpoch:
    """The first samples of a stream, and after them samples of which nothing is learnt.

    They fill up the last global batch: a loss per token is that of the others.
    """

    def __init__(self, stream: Samples, num_samples: int):
        self._stream, self._num_samples = stream, num_samples

    def length(self, position: int) -> int:
        return self._stream.length(position) if position < self._num_samples else len(UNLEARNT) - 1

    def tokens(self, position: int) -> np.ndarray:
        return self._stream.tokens(position) if position < self._num_samples else UNLEARNT


class WholeSet:
    """What Megatron takes for the data loader of such a set.

    Its length is the iterations of an evaluation, and each of its iterators is of one evaluation.
    """

    def __init__(self, microbatches: Iterable[Any], num_iterations: int):
        self._microbatches, self._num_iterations = microbatches, num_iterations

    def __len__(self) -> int:
        return self._num_iterations

    def __iter__(self) -> Iterator[Any]:
        return iter(self._microbatches)
