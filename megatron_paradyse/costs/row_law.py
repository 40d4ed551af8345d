"""Seconds of attention on a packed row, above those of one document of as many tokens.

    seconds(row) = max(one + factors . (work of the row - work of one document),
                       floor . (1, s, documents, peers))

one: seconds of one document of the row's s tokens. factors, of work in the order of FACTORS, is
what is computed and sent. floor is what launching takes: a kernel or more per document, exchanges
per peer, which a GPU hides behind computing where that takes longer, and what follows, by tokens.
All are at least 0, and a row of one document costs exactly what the document costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_paradyse.costs.hybrid import TIME_FLOOR
from megatron_paradyse.costs.laws import Array, fit_nonnegative, scale_of

FACTORS = ("score", "key", "document", "peer")
NOTHING = (0.0, 0.0, 0.0, 0.0)  # of factors, and of a floor
DOCUMENTS, PEERS = 2, 3  # of work and of a floor
MAX_SWAPS = 8  # of rows between what is computed and the floor, from one start


@dataclass(frozen=True)
class RowLaw:
    """Seconds per unit of work, and of the floor."""

    factors: tuple[float, ...] = NOTHING
    floor: tuple[float, ...] = NOTHING

    def excess(
        self, one: float, seq_length: int, work: tuple[float, ...], of_one: tuple[float, ...]
    ) -> float:
        """Seconds above `one`, negative where the row takes less."""
        more = [a - b for a, b in zip(work, of_one, strict=True)]
        computed = sum(factor * amount for factor, amount in zip(self.factors, more, strict=True))
        constant, token, document, peer = self.floor
        least = constant + token * seq_length + document * of_one[DOCUMENTS] + peer * of_one[PEERS]
        launched = min(one, least) - one + document * more[DOCUMENTS] + peer * more[PEERS]
        return max(computed, launched)


@dataclass(frozen=True)
class RowPoints:
    """What a law is fitted to. measured, one, s: [rows]; work, and of_one document: [rows, 4]."""

    measured: Array
    one: Array
    s: Array
    work: Array
    of_one: Array


def fit_row_law(points: RowPoints) -> RowLaw:
    """The law with the least AIC, errors relative to what was measured; without floor if level.

    Which rows are on the floor: from the shortest up and from the shortest documents up, so many
    at a time, then those that the two fits say, until they stay.
    """
    scale = scale_of(points.measured)
    computed = (points.work - points.of_one) / scale[:, None]
    excess = (points.measured - points.one) / scale
    columns = np.stack([np.ones_like(points.s), points.s, *points.work.T[DOCUMENTS:]], axis=1)
    launched, measured = columns / scale[:, None], points.measured / scale
    best = RowLaw(_least_squares(computed, excess))
    best_score = _score_of(best, points, scale)
    seen: set[bytes] = set()
    for on_floor in _starts(points):
        for _ in range(MAX_SWAPS):
            if on_floor.tobytes() in seen or not on_floor.any() or on_floor.all():
                break
            seen.add(on_floor.tobytes())
            law = RowLaw(
                _least_squares(computed[~on_floor], excess[~on_floor]),
                _least_squares(launched[on_floor], measured[on_floor]),
            )
            score = _score_of(law, points, scale)
            if score < best_score - 1e-9:
                best, best_score = law, score
            on_floor = _excesses(law, points) > (points.work - points.of_one) @ law.factors
    return best


def _starts(points: RowPoints) -> Iterator[np.ndarray]:
    for order in (points.one, points.work[:, 0] / np.maximum(points.work[:, DOCUMENTS], 1)):
        ranked = np.argsort(order, kind="stable")
        for count in range(1, len(ranked)):
            on_floor = np.zeros(len(ranked), bool)
            on_floor[ranked[:count]] = True
            yield on_floor


def _excesses(law: RowLaw, points: RowPoints) -> Array:
    rows = zip(points.one, points.s, points.work, points.of_one, strict=True)
    return np.array([law.excess(*row) for row in rows])


def _score_of(law: RowLaw, points: RowPoints, scale: Array) -> float:
    size = sum(factor > 0 for factor in law.factors)
    if any(law.floor):
        size += sum(part > 0 for part in law.floor) + 1  # and where it begins
    return _score((points.one + _excesses(law, points) - points.measured) / scale, size)


def _least_squares(design: Array, target: Array) -> tuple[float, ...]:
    """Factors >= 0, design @ factors near target; none where they are worth nothing."""
    found, score = fit_nonnegative(design, target, range(design.shape[1]), _score)
    return tuple(found.tolist()) if score < _score(target, 0) - 1e-9 else NOTHING


def _score(residual: Array, size: int) -> float:
    n = len(residual)
    variance = max(float(residual @ residual) / n, TIME_FLOOR**2)
    return n * float(np.log(variance)) + 2 * size + 2 * size * (size + 1) / max(n - size - 1, 0.5)
