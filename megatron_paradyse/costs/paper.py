"""The published model: a forest inside the profiled range, a polynomial of s beyond it.

The polynomial has order 1 to 3, chosen by AIC of its absolute error. The forest is of s, and of b
where several were profiled; the other published features do not vary within one cost file, and
strategies have a model each. What was published had b = 1: a batch size that was not profiled
is taken as the nearest that was, scaled by tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_paradyse.costs.forest import StepTable, forest_steps
from megatron_paradyse.costs.laws import Array

MAX_ORDER = 3


@dataclass(frozen=True)
class PaperFit:
    """values: the forest. polynomials: per batch size of values, coefficients of 1, s, s^2, ..."""

    values: StepTable
    polynomials: tuple[tuple[float, ...], ...]


def fit_paper(s: Array, b: Array, y: Array) -> PaperFit:
    """Fit y at the points (s, b)."""
    values = forest_steps(s, b, y)
    polynomials = []
    for batch_size in values.batch_sizes:
        chosen = b == batch_size
        polynomials.append(_polynomial(s[chosen], y[chosen]))
    return PaperFit(values, tuple(polynomials))


def _polynomial(s: Array, y: Array) -> tuple[float, ...]:
    # Fewer lengths than coefficients: the mean of a single one, otherwise a lower order.
    best, best_aic = (float(y.mean()),), math.inf
    scale = float(np.abs(y).max()) or 1.0
    for order in range(1, min(MAX_ORDER, len(s) - 1) + 1):
        coefficients = np.polyfit(s, y / scale, order)
        error = np.polyval(coefficients, s) - y / scale
        # An exact fit leaves rounding errors: no order is better than another below them.
        variance = max(float(error @ error) / len(s), 1e-24)
        aic = len(s) * math.log(variance) + 2 * (order + 1)
        if aic < best_aic:
            best = tuple((coefficients[::-1] * scale).tolist())
            best_aic = aic
    return best
