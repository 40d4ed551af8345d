"""Evaluates all fits of a model at one (s, b) at once, as a handful of array operations.

A row per (strategy, operation, quantity), in the order of QUANTITIES within each operation. What
depends on b alone is prepared once per batch size. Element by element and in the order in which one
fit is described, so that every machine rounds alike: a product of matrices is a library's affair.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from megatron_paradyse.costs.forest import StepTable, nearest
from megatron_paradyse.costs.hybrid import HybridFit, fade
from megatron_paradyse.costs.laws import NUM_TERMS, Array, Law
from megatron_paradyse.costs.paper import MAX_ORDER, PaperFit
from megatron_paradyse.costs.table import QUANTITIES

NUM_QUANTITIES = len(QUANTITIES)
KEPT, FORWARD, BACKWARD = (
    QUANTITIES.index(name) for name in ("kept_bytes", "forward_bytes", "backward_bytes")
)


class HybridEvaluation:
    """All hybrid fits at one batch size; see hybrid.py for what is computed."""

    def __init__(
        self, fits: Sequence[HybridFit], max_lengths: Sequence[int], batch_size: int
    ) -> None:
        b = batch_size
        laws = [fit.law for fit in fits]
        # Of layers and of the model's edges, which bend elsewhere.
        self._bends = sorted({law.bend_at(b) for law in laws if law.beyond is not None})
        self._sides = [
            _Side(
                [law.beyond if law.beyond and law.bend_at(b) in begun else law for law in laws], b
            )
            for begun in (self._bends[:count] for count in range(len(self._bends) + 1))
        ]
        self._max_lengths = np.array(max_lengths, dtype=float)
        self._corrected = np.array(
            [row for row, fit in enumerate(fits) if fit.factors is not None], dtype=int
        )
        starts = [fits[row].law.starts(b) for row in self._corrected]
        tables = [
            table.cut_at(at)
            for row, at in zip(self._corrected, starts, strict=True)
            if (table := fits[row].factors) is not None
        ]
        self._steps = _Steps(tables, batch_size)
        floors = np.zeros_like(self._steps.values)
        self._tops = np.zeros(len(tables))
        self._late = np.full(len(tables), np.inf)  # starts beyond the longest length
        for i, row in enumerate(self._corrected):
            law, values, longest = fits[row].law, self._steps.values[i], max_lengths[row]
            for k, edge in enumerate(self._steps.edges[i]):
                if np.isfinite(edge) and edge not in starts[i]:
                    floors[i, k + 1] = max(floors[i, k], law(edge, b) * values[k])
            k = self._steps.index(longest)[i]
            self._tops[i] = max(floors[i, k], law(longest, b) * values[k])
            self._late[i] = min((s for s in starts[i] if s > longest), default=np.inf)
        self._floors = floors

    def __call__(self, seq_length: float) -> Array:
        s = float(seq_length)
        values = self._sides[bisect_right(self._bends, s)](s)
        rows = self._corrected
        if len(rows):
            k = self._steps.index(s)
            factors, floors = self._steps.at(k), self._floors[self._steps.rows, k]
            beyond = s > self._max_lengths[rows]
            if beyond.any():
                left = np.array([fade(s, longest) for longest in self._max_lengths[rows].tolist()])
                factors = np.where(beyond, 1.0 + (factors - 1.0) * left, factors)
                floors = np.where(beyond & (s < self._late), self._tops, floors)
            values[rows] = np.maximum(values[rows] * factors, floors)
        table = values.reshape(-1, NUM_QUANTITIES)
        table[:, FORWARD:] -= table[:, KEPT, None]
        return np.maximum(table, 0.0)


class _Side:
    """Laws at one batch size, without what lies beyond a bend."""

    def __init__(self, laws: Sequence[Law], batch_size: int) -> None:
        self._batch_size = batch_size
        # Tokens up to a reach are those of a tile, of which no window hides any.
        windows = np.array([0.0 if law.of_tokens else law.window for law in laws])
        self._windows = windows if np.isfinite(windows).any() else None
        self._reaches = np.array(
            [law.reach / batch_size if law.of_tokens else law.reach for law in laws]
        )
        # Of layers and of the model's edges, which have tiles of their own.
        tiles = sorted({law.tile_tokens for law in laws if law.in_tiles})
        self._tile_lengths = [tokens / batch_size for tokens in tiles]
        self._laws = [
            _coefficients(
                [law.in_tiles if law.tile_tokens in begun else law.pieces for law in laws]
            )
            for begun in (tiles[:count] for count in range(len(tiles) + 1))
        ]

    def __call__(self, s: float) -> Array:
        c0, c1, c2, c3 = self._laws[bisect_left(self._tile_lengths, s)]
        return (c0 + self._batch_size * (c1 + s * (c2 + self._keys(s) * c3))).max(axis=0)

    def _keys(self, s: float) -> Array | float:
        """Of each law, see there."""
        if self._windows is None:
            return s
        within = s <= self._windows
        of_pairs = np.where(within, s, self._windows * (2.0 - self._windows / s))
        of_tiles = np.where(within, 0.0, np.minimum(s, self._reaches) / s)
        return np.where(self._reaches < math.inf, of_tiles, of_pairs)


def _coefficients(laws: Sequence[tuple[tuple[float, ...], ...]]) -> Array:
    """[4, pieces, laws]: of 1, b, s b, s^2 b; pieces that a law lacks are nothing."""
    num_pieces = max(map(len, laws), default=0) or 1
    values = np.zeros((NUM_TERMS, num_pieces, len(laws)))
    for row, pieces in enumerate(laws):
        for i, piece in enumerate(pieces):
            values[:, i, row] = piece
    return values


class PaperEvaluation:
    """All published fits at one batch size; see paper.py for what is computed."""

    def __init__(
        self, fits: Sequence[PaperFit], max_lengths: Sequence[int], batch_size: int
    ) -> None:
        self._steps = _Steps([fit.values for fit in fits], batch_size)
        self._max_lengths = np.array(max_lengths, dtype=float)
        self._polynomials = np.zeros((MAX_ORDER + 1, len(fits)))
        self._scale = np.ones(len(fits))
        for row, fit in enumerate(fits):
            i = nearest(fit.values.batch_sizes, batch_size)
            self._polynomials[: len(fit.polynomials[i]), row] = fit.polynomials[i]
            self._scale[row] = batch_size / fit.values.batch_sizes[i]

    def __call__(self, seq_length: float) -> Array:
        s = float(seq_length)
        inside = self._steps.at(self._steps.index(s))
        c0, c1, c2, c3 = self._polynomials
        beyond = c0 + s * (c1 + s * (c2 + s * c3))
        values = np.where(s <= self._max_lengths, inside, beyond)
        return np.maximum(values * self._scale, 0.0).reshape(-1, NUM_QUANTITIES)


class _Steps:
    """Step tables side by side at one batch size, padded to the longest."""

    def __init__(self, tables: Sequence[StepTable], batch_size: int) -> None:
        width = max((len(table.edges) for table in tables), default=0)
        self.rows = np.arange(len(tables))
        self.edges = np.full((len(tables), width), np.inf)
        self.values = np.zeros((len(tables), width + 1))
        for row, table in enumerate(tables):
            values = table.rows[nearest(table.batch_sizes, batch_size)]
            self.edges[row, : len(table.edges)] = table.edges
            self.values[row, : len(values)] = values

    def index(self, seq_length: float) -> np.ndarray:
        return (self.edges <= seq_length).sum(axis=1)

    def at(self, index: np.ndarray) -> Array:
        return self.values[self.rows, index]
