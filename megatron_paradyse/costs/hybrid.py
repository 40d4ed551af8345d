"""The hybrid model: a law fitted to relative error, and a forest on what it leaves over.

    value(s, b) = max( law(s, b) * (1 + residual(s)),  its value at any shorter s of that law )

The forest is kept only where it halves the squared error when every interior length is predicted
from its two neighbours: that is what a forest without that length would say, so noise, which the
neighbours do not share, is not learnt. Beyond the longest profiled length the residual fades out
over one doubling of s; below the shortest it stays. So the value is continuous at both edges and
never falls with s, but where tiles or a law beyond a bend begin: what is measured falls there.

Bytes of an attention with a window whose kernel is ours jump at the window, and again where a
rank's part of the sequence is beyond it. Where their law is not near, the residual of each length,
exact as they are, holds up to the middle between it and the next. So it does of bytes of a loss
head and an embedding that go in tiles, the last of which is fuller at some lengths than at others.

Workspace may truly fall with s: what is measured above the bytes kept shrinks as those grow. Its
peak, workspace + kept, cannot. The law is therefore fitted to the peak, and kept is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_paradyse.costs.forest import StepTable, forest_steps, nearest_steps
from megatron_paradyse.costs.laws import NEAR, Array, Law, aicc, fit_law, num_terms, scale_of
from megatron_paradyse.costs.layers import ATTENTION, LAYER, half_of

# Times repeat to a percent at best; bytes are counted, and vary with rounding and alignment only.
TIME_FLOOR, BYTES_FLOOR = 5e-3, 1e-3
TIME_PIECES, BYTES_PIECES = 2, 3
MAX_RESIDUAL = 0.5
LEAST_OF_SIDE = 2  # points, for a law of what goes in tiles and one of what does not; of bends
GAIN = 0.5  # of the squared error, that a forest must save


@dataclass(frozen=True)
class HybridFit:
    """law, and the factors (1 + residual) by which steps of s correct it; None: by nothing."""

    law: Law
    factors: StepTable | None = None


def fit_hybrid(
    s: Array,
    b: Array,
    y: Array,
    *,
    operation: str,
    is_time: bool,
    kept: Array | None = None,
    tile_tokens: float = math.inf,
    whole_tokens: float = math.inf,
    window: float = math.inf,
    reaches: Sequence[float] = (),
    bend: float = math.inf,
    bend_of_tokens: bool = False,
) -> HybridFit:
    """Fit y at the points (s, b); kept: y is workspace above it, and the fit is of their sum.

    tile_tokens: of a microbatch of which a rank holds one tile: bytes beyond have their own law.
    whole_tokens: up to which these may grow with tokens as not beyond; of what has no window.
    window: keys that a query of the attention sees; what computes all scores and hides some is
    told from what leaves them out by which law is nearer; so is a tile of scores, see laws.py, of
    which reaches are the keys that it may have at most. bend: the shortest sequence of those that
    may have a law of their own, or where bend_of_tokens the fewest tokens s b.

    Attention is quadratic in s and linear in b, everything else linear in s b: only there are
    pairs of tokens among the terms.
    """

    every = [(math.inf, math.inf)]
    if window < math.inf:
        tiles = [(window, reach) for reach in reaches]
        every = [(window, math.inf), *every] if is_time else [*every, *tiles]

    def law_of(chosen, seen=every) -> Law:
        return fit_law(
            s[chosen],
            b[chosen],
            y[chosen],
            above=None if kept is None else kept[chosen],
            quadratic=half_of(operation) in (ATTENTION, LAYER),
            max_pieces=TIME_PIECES if is_time else BYTES_PIECES,
            error_floor=TIME_FLOOR if is_time else BYTES_FLOOR,
            exact=not is_time,
            seen=seen,
        )

    total = y if kept is None else y + kept

    def law_of_side(chosen) -> Law:
        """With tiles apart where there is need."""
        law, beyond = law_of(chosen), chosen & (s * b > tile_tokens)
        if is_time or not beyond.any() or np.array_equal(beyond, chosen):
            return law
        if _is_near(law, s[chosen], b[chosen], total[chosen]):
            return law
        few, many = sorted((beyond, chosen & ~beyond), key=np.count_nonzero)
        if np.count_nonzero(few) < LEAST_OF_SIDE:
            s_one, b_one, y_one = (float(x[few.argmax()]) for x in (s, b, total))
            return _with_one_more(law_of(many), s_one, b_one, y_one, tile_tokens)
        below = law_of(chosen & ~beyond)
        more = [(math.inf, whole_tokens)] if whole_tokens < math.inf else []
        above = law_of(beyond, [(below.window, below.reach), *more])
        if above.pieces:
            reach = min(below.reach, above.reach)
            return replace(below, in_tiles=above.pieces, tile_tokens=tile_tokens, reach=reach)
        return law

    law = law_of_side(np.ones_like(s, dtype=bool))
    long = (s * b if bend_of_tokens else s) >= bend
    if min(len(np.unique(s[side])) for side in (long, ~long)) >= LEAST_OF_SIDE + is_time:
        below, beyond = law_of_side(~long), law_of_side(long)
        apart = replace(below, beyond=beyond, bend=bend, bend_of_tokens=bend_of_tokens)
        if is_time:
            scores = [_score(one, s, b, total) for one in (law, apart)]
            law = apart if scores[1] < scores[0] else law
        elif not _is_near(law, s, b, total):
            law = apart
    if is_time and law.beyond is not None:
        return HybridFit(law)
    fitted = np.array([law(x, z) for x, z in zip(s, b, strict=True)])
    if not np.all(fitted > 0):
        return HybridFit(law)
    residual = total / fitted - 1
    if not is_time and min(window, whole_tokens) < math.inf and not _is_near(law, s, b, total):
        steps = nearest_steps(s, b, residual)
    elif _neighbours_agree(s, b, residual, TIME_FLOOR if is_time else BYTES_FLOOR):
        steps = forest_steps(s, b, residual)
    else:
        return HybridFit(law)
    rows = tuple(
        tuple(1 + min(max(r, -MAX_RESIDUAL), MAX_RESIDUAL) for r in row) for row in steps.rows
    )
    return HybridFit(law, StepTable(steps.edges, steps.batch_sizes, rows))


def _with_one_more(law: Law, s: float, b: float, y: float, tile_tokens: float) -> Law:
    """The law of the points on one side of a tile, and of one y on the other.

    Fewer tokens of y's side hold y at most, and more of them no more than in proportion; beyond the
    tile no more than as much more as the law says, too: what goes in tiles grows less.
    """
    more = min(law(2 * s, b) - law(s, b), y) if s * b > tile_tokens else y
    pieces = ((y, 0.0, 0.0, 0.0), (y - more, 0.0, more / (s * b), 0.0))
    if s * b > tile_tokens:
        return replace(law, in_tiles=pieces, tile_tokens=tile_tokens)
    return replace(law, pieces=pieces, in_tiles=law.pieces, tile_tokens=tile_tokens)


def _score(law: Law, s: Array, b: Array, y: Array) -> float:
    told = np.array([law(x, z) for x, z in zip(s, b, strict=True)])
    return aicc((told - y) / scale_of(y), num_terms(law), TIME_FLOOR)


def _is_near(law: Law, s: Array, b: Array, y: Array) -> bool:
    """Whether the law is nowhere off by more than laws.NEAR."""
    told = np.array([law(x, z) for x, z in zip(s, b, strict=True)])
    return bool(np.all(np.abs(told - y) <= NEAR * scale_of(y)))


def _neighbours_agree(s: Array, b: Array, residual: Array, floor: float) -> bool:
    """Whether the residual of a length is told by the lengths beside it."""
    left = right = 0.0
    count = 0
    for batch_size in np.unique(b):
        chosen = b == batch_size
        r = residual[chosen][np.argsort(s[chosen])]
        told = (r[:-2] + r[2:]) / 2
        left += float(np.sum((r[1:-1] - told) ** 2))
        right += float(np.sum(r[1:-1] ** 2))
        count += len(told)
    return count >= 3 and right > count * floor**2 and left < GAIN * right


def fade(seq_length: float, max_length: float) -> float:
    """The share of the residual that is left at s: 1 up to the longest profiled, 0 at twice it."""
    return min(1.0, max(0.0, 1.0 - math.log2(seq_length / max_length)))
