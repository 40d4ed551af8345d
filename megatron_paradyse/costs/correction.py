"""What training measures, as factors per strategy on the seconds and bytes that costs predict.

Seconds. A microbatch's time over its prediction, y = log(measured / predicted), is modelled as

    y = g + sum_k share_k d_k + noise          share_k: strategy k's part of the predicted time

g is the machine's drift, d_k the strategy's own. Both start at zero with a prior (a Bayesian linear
regression, linearised at the current estimate): a strategy that has not run follows g alone, so a
machine that is slower at everything changes no plan. Older microbatches fade.

Trials. One strategy that ran alone and took longer than predicted does not tell whether the machine
is slow or its own price too low. Where told to explore, strategies that have not run are planned
with a hope: as if up to one standard deviation of d_k of that drift were not theirs. They run if
that makes them the fastest, and once they have, what they took counts.

Bytes. A factor rises to what a microbatch took beyond its static part, over what was predicted,
where the safety margin did not cover it. It never falls.

A strategy and its +recompute and +offload variants share their factors: they run the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_paradyse.costs.table import MODEL, OperationCosts
from megatron_paradyse.strategies import base_name

PRIOR_DRIFT, PRIOR_STRATEGY, NOISE = 1.0, 0.3, 0.1  # standard deviations of logarithms
FADE = 0.97  # of what was known, at each update
MOST_SURPRISE = 0.5  # of a logarithm: one stalled microbatch must not turn the plans
SENSIBLE = 0.03  # change of a factor that is worth planning again
DRIFT = 0.25  # beyond it the user is told
DOUBT = 0.1  # drift beyond which what has not run is tried
TRIED = 3.0  # microbatches of average length that have tried a strategy
MOST_FACTOR = 8.0


@dataclass(frozen=True)
class Observation:
    """One microbatch. seconds: predicted with the present factors, by strategy (without suffix).

    measured_seconds: None where they tell nothing of strategies.
    peak_ratio: (measured peak - static) / (predicted peak - static), where the peak is known and
    above the predicted one with its margin; else None.
    """

    predicted_seconds: dict[str, float]
    measured_seconds: float | None
    peak_ratio: float | None = None


class Correction:
    """Factors by strategy, from sums of observations that the caller has added over all ranks."""

    def __init__(self, strategies: Sequence[str]):
        """strategies: as plans name them, with or without +recompute or +offload."""
        self.names = tuple(dict.fromkeys(base_name(name) for name in strategies))
        size = len(self.names)
        self.seconds = np.zeros(size)  # logarithms of the factors in force
        self.hopes = np.zeros(size)  # by which plans are made with less
        self.bytes = np.ones(size)
        self._prior = np.diag([PRIOR_DRIFT**-2.0, *[PRIOR_STRATEGY**-2.0] * size])
        self._known = np.zeros((1 + size, 2 + size))  # faded sums
        self._ran = np.zeros(size)  # weights, which do not fade
        self._mean_seconds = 0.0
        self._told: set[str] = set()

    def factors(self, strategy: str) -> tuple[float, float]:
        """Of seconds, as plans are made, and of bytes."""
        index = self._index(strategy)
        if index is None:
            return 1.0, 1.0
        return math.exp(self.seconds[index] - self.hopes[index]), float(self.bytes[index])

    def sums(self, observations: Sequence[Observation]) -> np.ndarray:
        """[K + 1, K + 2]: the normal equations of these microbatches; longer ones weigh more.

        They add over ranks: update() takes the sum.
        """
        size = 1 + len(self.names)
        total = np.zeros((size, size + 1))
        for observation in observations:
            measured = observation.measured_seconds
            if measured is None:
                continue
            predicted = sum(observation.predicted_seconds.values())
            row = np.zeros(size)
            row[0] = 1.0
            for name, seconds in observation.predicted_seconds.items():
                row[1 + self.names.index(name)] = seconds / predicted
            # The model's value at the factors in force, and what was seen beyond it.
            surprise = math.log(measured / predicted) if measured > 0 else -MOST_SURPRISE
            in_force = row[1:] @ (self.seconds - self.hopes)
            y = in_force + float(np.clip(surprise, -MOST_SURPRISE, MOST_SURPRISE))
            # By what was predicted: one that stalls must not outweigh all others.
            self._mean_seconds += (predicted - self._mean_seconds) * (
                0.1 if self._mean_seconds else 1.0
            )
            weight = min(predicted / self._mean_seconds, 4.0) / NOISE**2
            total[:, :size] += weight * np.outer(row, row)
            total[:, size] += weight * row * y
        return total

    def peaks(self, observations: Sequence[Observation]) -> np.ndarray:
        """[K]: the factors on bytes these microbatches ask for; the largest of any rank counts."""
        found = self.bytes.copy()
        for observation in observations:
            if observation.peak_ratio is None:
                continue
            for name in observation.predicted_seconds:
                index = self.names.index(name)
                wanted = self.bytes[index] * observation.peak_ratio
                found[index] = min(max(found[index], wanted), MOST_FACTOR)
        return found

    def update(self, sums: np.ndarray, peaks: np.ndarray, *, explore: bool = False) -> np.ndarray:
        """[3, K]: the factors' new logarithms, hopes and bytes; not in force before apply().

        explore: whether what has not run may be tried.
        """
        self._known = FADE * self._known + sums
        self._ran += sums[0, 1:-1]
        state = np.linalg.solve(self._known[:, :-1] + self._prior, self._known[:, -1])
        most = math.log(MOST_FACTOR)
        enough = TRIED / NOISE**2
        hope = 0.0
        if explore and self._ran.sum() >= enough:
            hope = min(max(state[0] - math.log1p(DOUBT), 0.0), PRIOR_STRATEGY)
        hopes = np.where(self._ran < enough, hope, 0.0)
        return np.stack([np.clip(state[0] + state[1:], -most, most), hopes, peaks])

    def apply(self, values: np.ndarray) -> bool:
        """Put factors into force where they differ enough to plan again; whether they did."""
        seconds, hopes, peaks = values
        change = np.abs(seconds - hopes - (self.seconds - self.hopes)).max()
        if change < SENSIBLE and (peaks <= self.bytes).all():
            return False
        self.seconds, self.hopes, self.bytes = seconds.copy(), hopes.copy(), peaks.copy()
        return True

    def set_seconds(
        self, factors: Mapping[str, float], hopes: Mapping[str, float] | None = None
    ) -> None:
        """Put given factors into force; names that are not known are left out."""
        self.seconds, self.hopes = self._logarithms(factors), -self._logarithms(hopes or {})

    def _logarithms(self, factors: Mapping[str, float]) -> np.ndarray:
        found = [max(factors.get(name, 1.0), 1e-9) for name in self.names]
        most = math.log(MOST_FACTOR)
        return np.clip(np.log(found), -most, most)

    def drifted(self, ran: Sequence[str]) -> list[str]:
        """What to tell the user of strategies that ran: once for each, a line without newline."""
        lines = []
        for name in ran:
            index = self.names.index(name)
            if abs(self.seconds[index]) > math.log1p(DRIFT) and name not in self._told:
                self._told.add(name)
                lines.append(
                    f"{name} takes {math.exp(self.seconds[index]):.2f} of the time that the cost "
                    "file says: profile again on this machine (plans are corrected meanwhile)"
                )
            if self.bytes[index] > 1.0 and f"{name} bytes" not in self._told:
                self._told.add(f"{name} bytes")
                lines.append(
                    f"{name} took {self.bytes[index]:.2f} of the memory that the cost file says: "
                    "profile again (plans are corrected meanwhile)"
                )
        return lines

    def trials(self) -> list[str]:
        """What to tell the user of strategies that are tried next; once, a line without newline."""
        names = [name for name, hope in zip(self.names, self.hopes, strict=True) if hope > 0]
        if not names or "trials" in self._told:
            return []
        self._told.add("trials")
        return [
            "what ran takes longer than the cost file says: trying, where they may be faster, "
            f"for a few iterations {', '.join(names)}"
        ]

    def as_record(self) -> dict[str, dict[str, float]]:
        """Factors by strategy, for the trace; hopes where there are any."""
        record = {
            "seconds_factors": self._named(np.exp(self.seconds)),
            "bytes_factors": self._named(self.bytes),
        }
        hopes = {"hopes": self._named(np.exp(-self.hopes))} if self.hopes.any() else {}
        return record | hopes

    def _named(self, values: np.ndarray) -> dict[str, float]:
        return dict(zip(self.names, values.round(4).tolist(), strict=True))

    def _index(self, strategy: str) -> int | None:
        name = base_name(strategy)
        return self.names.index(name) if name in self.names else None


def corrected(
    costs_of: Callable[[str, str, int, int], OperationCosts], correction: Correction
) -> Callable[[str, str, int, int], OperationCosts]:
    """The same costs with the factors that are in force when they are asked for."""

    def costs(strategy: str, operation: str, s: int, b: int) -> OperationCosts:
        found = costs_of(strategy, operation, s, b)
        if strategy == MODEL:
            return found
        seconds, bytes_ = correction.factors(strategy)
        if seconds == 1.0 and bytes_ == 1.0:
            return found
        return OperationCosts(
            found.forward_seconds * seconds,
            found.backward_seconds * seconds,
            found.kept_bytes * bytes_,
            found.forward_bytes * bytes_,
            found.backward_bytes * bytes_,
        )

    return costs
