"""Which lengths are profiled, and which are left out because they would not fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from megatron_paradyse.costs.table import Measurement
from megatron_paradyse.errors import UserError

SHORTEST = 128
COUNT = 8
SPACING = 1.4
MIN_TO_EXTRAPOLATE = 3


def default_lengths(longest: int, *, p: int, count: int = COUNT) -> tuple[int, ...]:
    """At most `count` lengths from 128 to `longest`, evenly spaced on a log scale.

    Multiples of 2p, since rings swap halves of a rank's share. The shortest is less than 128 when
    `longest` is less than 512.
    """
    step = 2 * p
    if longest < step:
        raise UserError(
            f"the longest length to profile must be at least 2p = {step}, got {longest}"
        )
    shortest = max(step, min(SHORTEST, longest // 4))
    last = longest // step * step
    rounded = (round(length / step) * step for length in np.geomspace(shortest, longest, count))
    return tuple(sorted({min(max(step, length), last) for length in rounded} | {last}))


def check_longest(lengths: Sequence[int] | None, longest: int | None) -> None:
    """UserError where --max-length, of the default lengths, stands beside --lengths."""
    if lengths and longest is not None:
        raise UserError(
            f"--max-length {longest} with --lengths, which says the longest: leave one of them out"
        )


def lengths_between(lengths: Sequence[int], *, p: int) -> tuple[int, ...]:
    """Lengths at which bytes are measured besides these, which are timed and ascend.

    A peak bends where activations outgrow weights, and a bend between two lengths cannot be placed
    unless there are two lengths on either side. Bytes take one run each, cheap where it is short:
    up to a quarter of the longest length, no two are then further apart than 7/5. One stands right
    beside the shortest: what bends just above that had a single length below the bend.
    """
    step = 2 * p
    found = {lengths[0] + step} if lengths[0] < lengths[-1] / 4 else set()
    for shorter, longer in itertools.pairwise(lengths):
        if shorter < lengths[-1] / 4:
            parts = math.ceil(math.log(longer / shorter) / math.log(SPACING))
            spaced = np.geomspace(shorter, longer, parts + 1)[1:-1]
            found |= {round(length / step) * step for length in spaced}
    return tuple(sorted(found - set(lengths)))


def check_lengths(lengths: Sequence[int], *, p: int) -> tuple[int, ...]:
    """The user's lengths, ascending; UserError for one that the ranks cannot share."""
    for length in lengths:
        if length < 1 or length % (2 * p):
            nearest = max(2 * p, round(length / (2 * p)) * 2 * p)
            raise UserError(f"--lengths {length} is not a multiple of 2p = {2 * p}: use {nearest}")
    return tuple(sorted(set(lengths)))


def expected_bytes(measured: Sequence[Measurement], seq_length: int) -> float | None:
    """What an operation will hold at its peak, above what is there before it.

    From measurements of one (strategy, operation, b) at other lengths: a polynomial of degree 2
    fitted to relative error, since workspaces are at most quadratic. None when there are fewer than
    three of them.
    """
    ok = [m for m in measured if m.is_ok]
    if len(ok) < MIN_TO_EXTRAPOLATE:
        return None
    s = np.array([m.seq_length for m in ok], dtype=np.float64) / seq_length
    y = np.array([m.kept_bytes + max(m.forward_bytes, m.backward_bytes) for m in ok])
    weights = 1 / np.maximum(y, 1.0)
    columns = np.stack([np.ones_like(s), s, s**2], axis=1)
    fitted, *_ = np.linalg.lstsq(columns * weights[:, None], y * weights, rcond=None)
    return float(max(fitted.sum(), y[s <= 1].max(initial=0.0)))
