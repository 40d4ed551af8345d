"""How far a tensor is from the truth, from the deviations of its shards."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Deviation:
    """Squared norms and maxima of a difference and of the truth: of a shard, or of all together."""

    error_square: float
    truth_square: float
    error_max: float
    truth_max: float
    finite: bool = True

    @property
    def by_norm(self) -> float:
        """||got - truth|| / ||truth||."""
        return math.sqrt(_ratio(self.error_square, self.truth_square)) if self.finite else math.inf

    @property
    def relative(self) -> float:
        """The worse of the norm-wise and the max-wise relative error."""
        return max(self.by_norm, _ratio(self.error_max, self.truth_max))


def _ratio(error: float, truth: float) -> float:
    if truth == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / truth


def deviation(got: Tensor, truth: Tensor) -> Deviation:
    assert got.shape == truth.shape, (got.shape, truth.shape)
    truth = truth.double().cpu()
    error = got.double().cpu() - truth
    return Deviation(
        error.square().sum().item(),
        truth.square().sum().item(),
        error.abs().max().item(),
        truth.abs().max().item(),
        bool(got.isfinite().all()),
    )


def combine(by_rank: list[dict[str, Deviation]]) -> dict[str, Deviation]:
    """The deviation of each whole tensor, from its shards' deviations."""
    whole = {}
    for name in by_rank[0]:
        parts = [result[name] for result in by_rank]
        whole[name] = Deviation(
            sum(part.error_square for part in parts),
            sum(part.truth_square for part in parts),
            max(part.error_max for part in parts),
            max(part.truth_max for part in parts),
            all(part.finite for part in parts),
        )
    return whole
