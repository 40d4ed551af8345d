"""Laws of a quantity over (s, b): the largest of up to three polynomials, none of which falls.

    P(s, b) = max over pieces of  c0 + c1 b + c2 s b + c3 s^2 b        all c >= 0

Tokens s b do the linear work and fill the activations; pairs of tokens s^2 b do the attention; the
rest (weights, launches, latency) does not depend on s. Where a query sees a window of w keys, pairs
beyond w tokens are s^2 - (s - w)^2: no sum of the other terms grows ever less steeply. A peak is
the largest of several moments, each of which is such a sum, and so is a time of which one part
hides another: hence the maximum. With non-negative coefficients a law never falls with s or b and
extrapolates without surprises.

Where the kernel of an attention with a window is ours, its bytes have a tile of scores, once s is
beyond the window: of its queries times the s keys that are there, or the `reach` that they see at
most. The last term is of these keys then.

Some of it goes in tiles of the sequence when tokens are more than a tile's, which is known
(strategies/sizes.py): where no law comes near all exact numbers, those beyond have their own. So
have sequences that are long beside a window, where rings of attention exchange other keys. Of a
loss head in tiles the second grows until tokens are two tiles' and is whole from then on: less
steeply, again, which no largest of sums is. The last term may be of tokens up to `reach` there.

Fitted to relative error (weights 1/y). How many pieces and which terms: by Akaike's criterion, with
a floor under the error, so that no term is spent on what no plan would notice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_TERMS = 4
CONSTANT, BATCH, TOKENS, PAIRS = range(NUM_TERMS)
MAX_PIECES = 3
# Below this share of a quantity's largest value, errors are relative to it instead.
SMALLEST = 1e-3
# Seconds and bytes below it count as it: pairs of the longest sequences over it are still finite.
NOTHING = 1e-30
# A law of exact numbers comes near when its root mean square error is below this.
NEAR = 0.02


@dataclass(frozen=True)
class Law:
    """pieces: coefficients of 1, b, s b, s^2 b; the law is the largest piece, or 0.

    in_tiles: those for s b > tile_tokens; empty: there is none but pieces. window: the keys that a
    query sees, itself included. reach: where it is finite, c3 is of keys b in place of s^2 b: none
    up to the window, then s, and reach at most; without a window of the tokens s b, reach at most.
    beyond: the law for s >= bend, or for s b >= bend where bend_of_tokens, which has no beyond;
    None: this one.
    """

    pieces: tuple[tuple[float, ...], ...]
    in_tiles: tuple[tuple[float, ...], ...] = ()
    tile_tokens: float = math.inf
    window: float = math.inf
    reach: float = math.inf
    beyond: Law | None = None
    bend: float = math.inf
    bend_of_tokens: bool = False

    def __call__(self, seq_length: float, batch_size: float) -> float:
        s, b = seq_length, batch_size
        if self.beyond is not None and s >= self.bend_at(b):
            return self.beyond(s, b)
        pieces, keys = self._pieces(s * b), self.keys(s, b)
        return max((c0 + b * (c1 + s * (c2 + keys * c3)) for c0, c1, c2, c3 in pieces), default=0)

    def bend_at(self, batch_size: float) -> float:
        """The shortest s of beyond."""
        return self.bend / batch_size if self.bend_of_tokens else self.bend

    def keys(self, seq_length: float, batch_size: float = 1) -> float:
        """That are counted for a query: s, or less where the window is shorter; or a tile's / s."""
        s = seq_length
        if self.of_tokens:
            return min(s, self.reach / batch_size) / s
        if self.reach < math.inf:
            return min(s, self.reach) / s if s > self.window else 0.0
        return s if s <= self.window else self.window * (2.0 - self.window / s)

    @property
    def of_tokens(self) -> bool:
        """Whether c3 is of tokens up to reach."""
        return _is_of_tokens(self.window, self.reach)

    def starts(self, batch_size: float) -> tuple[float, ...]:
        """Where its next parts begin, at which alone it may fall: lengths, ascending."""
        own = [math.nextafter(self.tile_tokens / batch_size, math.inf)] if self.in_tiles else []
        if self.beyond is None:
            return tuple(own)
        more, bend = self.beyond.starts(batch_size), self.bend_at(batch_size)
        return (*(s for s in own if s < bend), bend, *(s for s in more if s > bend))

    def _pieces(self, tokens: float) -> tuple[tuple[float, ...], ...]:
        return self.in_tiles if tokens > self.tile_tokens else self.pieces


@dataclass(frozen=True)
class _Piece:
    coefficients: Array
    num_terms: int


def num_terms(law: Law) -> int:
    """How many numbers the law is made of: coefficients, and where its parts meet."""
    count = sum(sum(c > 0 for c in piece) for piece in law.pieces) + max(len(law.pieces) - 1, 0)
    return count if law.beyond is None else count + 1 + num_terms(law.beyond)


def _is_of_tokens(window: float, reach: float) -> bool:
    return window == math.inf > reach


def terms(s: Array, b: Array, window: float = math.inf, reach: float = math.inf) -> Array:
    """[..., 4]: what the coefficients of a law multiply."""
    pairs = s * s - np.maximum(s - window, 0.0) ** 2
    if _is_of_tokens(window, reach):
        pairs = np.minimum(s, reach / b)
    elif reach < math.inf:
        pairs = np.where(s > window, np.minimum(s, reach), 0.0)
    return np.stack(np.broadcast_arrays(np.ones_like(s), b, s * b, pairs * b), axis=-1)


def scale_of(y: Array) -> Array:
    """What errors of y are relative to: y, where it is not nearly nothing."""
    return np.maximum(y, max(SMALLEST * float(y.max(initial=0.0)), NOTHING))


def fit_law(
    s: Array,
    b: Array,
    y: Array,
    *,
    above: Array | None = None,
    quadratic: bool,
    max_pieces: int,
    error_floor: float,
    exact: bool,
    seen: Sequence[tuple[float, float]] = ((math.inf, math.inf),),
) -> Law:
    """The law of y >= 0 (of y + above, if given) at the points (s, b) with the least AIC.

    above: bytes that y is counted above. The law is then of their sum, with errors relative to y.
    quadratic: whether pairs of tokens may matter. error_floor: the relative error under which fits
    count as equal. exact: y is counted, not timed. Then AIC needs no correction for few points,
    and pairs are tried only where no law without them comes near: an exact number has no noise
    that could hide a square, and a square that is not there ruins what lies beyond the range.
    seen: window and reach, one of these; a tie goes to the first. Of tokens up to reach, without a
    window, there may be a term whatever quadratic says.
    """
    total = y if above is None else y + above
    if not np.any(total > 0):
        return Law(())
    order = np.argsort(s * b, kind="stable")
    scale = scale_of(y)[order]
    target = total[order] / scale
    best, best_score = Law(()), math.inf
    linear = [CONSTANT, TOKENS] + ([BATCH] if len(np.unique(b)) > 1 else [])
    for window, reach in seen:
        design = terms(s, b, window, reach)[order] / scale[:, None]
        more = quadratic or _is_of_tokens(window, reach)
        choices = [[*linear, PAIRS]] if more else [linear]
        if exact and quadratic:
            choices = [linear, [*linear, PAIRS]]
        found, score = _fit_pieces(design, target, choices, max_pieces, error_floor, exact)
        if score < best_score - 1e-9:
            best, best_score = Law(found, window=window, reach=reach), score
    return best


def _fit_pieces(
    design: Array,
    target: Array,
    choices: Sequence[Sequence[int]],
    max_pieces: int,
    error_floor: float,
    exact: bool,
) -> tuple[tuple[tuple[float, ...], ...], float]:
    """The pieces with the least AIC, and that; of the first choice of terms that comes near."""
    for candidates in choices:
        best: tuple[tuple[float, ...], ...] = ()
        best_score = best_error = math.inf
        for pieces in _piecewise(design, target, candidates, max_pieces, error_floor):
            residual = np.max([design @ piece.coefficients for piece in pieces], axis=0) - target
            size = sum(piece.num_terms for piece in pieces) + len(pieces) - 1
            score = (
                _aic(residual, size, error_floor) if exact else aicc(residual, size, error_floor)
            )
            # A tie goes to the first, which has the fewest pieces.
            if score < best_score - 1e-9:
                best = tuple(tuple(piece.coefficients.tolist()) for piece in pieces)
                best_score = score
                best_error = math.sqrt(float(residual @ residual) / len(residual))
        if best_error < NEAR:
            break
    return best, best_score


def _piecewise(
    design: Array, target: Array, candidates: Sequence[int], max_pieces: int, error_floor: float
) -> Iterator[list[_Piece]]:
    """Every way to cut the points, ordered by tokens, into pieces of at least two points."""
    n = len(target)
    made: dict[tuple[int, int], _Piece] = {}

    def piece(start: int, stop: int) -> _Piece:
        if (start, stop) not in made:
            rows = slice(start, stop)
            made[start, stop] = _fit_piece(design[rows], target[rows], candidates, error_floor)
        return made[start, stop]

    for num_pieces in range(1, max_pieces + 1):
        for cuts in itertools.combinations(range(2, n - 1), num_pieces - 1):
            edges = (0, *cuts, n)
            if all(stop - start >= 2 for start, stop in itertools.pairwise(edges)):
                yield [piece(start, stop) for start, stop in itertools.pairwise(edges)]


def _fit_piece(
    design: Array, target: Array, candidates: Sequence[int], error_floor: float
) -> _Piece:
    """Of at most four terms."""

    def score(residual: Array, size: int) -> float:
        return _aic(residual, size, error_floor)

    coefficients, _ = fit_nonnegative(design, target, candidates, score)
    return _Piece(coefficients, int(np.count_nonzero(coefficients)))


def fit_nonnegative(
    design: Array, target: Array, candidates: Sequence[int], score: Callable[[Array, int], float]
) -> tuple[Array, float]:
    """Coefficients >= 0 with design @ coefficients near target, and their score: least squares.

    Every set of the candidate columns is tried (four make 15): the least score(residual, columns)
    wins, the smaller set at a tie. Infinite where no set has a solution.
    """
    best, best_score = np.zeros(design.shape[1]), math.inf
    for size in range(1, min(len(candidates), len(target)) + 1):
        for chosen in itertools.combinations(candidates, size):
            columns = design[:, chosen]
            norms = np.linalg.norm(columns, axis=0)
            if not norms.all():
                continue
            solution, *_ = np.linalg.lstsq(columns / norms, target, rcond=None)
            if solution.min() < 0:
                continue
            found = score(columns @ (solution / norms) - target, size)
            if found < best_score - 1e-9:
                best, best_score = np.zeros(design.shape[1]), found
                best[list(chosen)] = solution / norms
    return best, best_score


def aicc(residual: Array, size: int, error_floor: float) -> float:
    """Akaike's criterion for few points; with no point to spare, as if there were half of one."""
    spare = max(len(residual) - size - 1, 0.5)
    return _aic(residual, size, error_floor) + 2 * size * (size + 1) / spare


def _aic(residual: Array, size: int, error_floor: float) -> float:
    variance = max(float(residual @ residual) / len(residual), error_floor**2)
    return len(residual) * math.log(variance) + 2 * size
