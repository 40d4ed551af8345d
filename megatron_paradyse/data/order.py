"""In which order the samples of an epoch are trained on."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from megatron_paradyse.data.choices import BUCKETED

Order = Callable[[np.ndarray, int], np.ndarray]  # (lengths, epoch) -> a permutation


def shuffled(lengths: np.ndarray, epoch: int, *, seed: int) -> np.ndarray:
    """A permutation that depends on the seed and the epoch."""
    return np.random.default_rng([seed, epoch]).permutation(len(lengths))


def short_to_long(lengths: np.ndarray, epoch: int) -> np.ndarray:
    """By length, as the paper trained; equal lengths stay in the order of the data."""
    return np.argsort(lengths, kind="stable")


def bucketed(lengths: np.ndarray, epoch: int, *, seed: int, group: int) -> np.ndarray:
    """Groups of like lengths in shuffled order, so that a group pads little.

    Samples are shuffled inside buckets of lengths between neighbouring powers of two, cut into
    groups (one global batch each), and the groups are shuffled. What is left of each bucket comes
    last, short to long; but the longest of it first, where an epoch does not begin with a global
    batch, up to the next one, so that groups do.
    """
    random = np.random.default_rng([seed, epoch])
    permutation = random.permutation(len(lengths))
    bucket = np.log2(np.maximum(lengths, 1)).astype(np.int64)
    permutation = permutation[np.argsort(bucket[permutation], kind="stable")]
    sizes = np.bincount(bucket)
    groups: list[np.ndarray] = []
    rests: list[np.ndarray] = []
    for stop, size in zip(np.cumsum(sizes), sizes, strict=True):
        members = permutation[stop - size : stop]
        whole = size - size % group
        groups.extend(members[:whole].reshape(-1, group))
        rests.append(members[whole:])
    order = [groups[i] for i in random.permutation(len(groups))]
    rest = np.concatenate(rests)
    before = min(-epoch * len(lengths) % group, len(lengths))
    if before > len(rest):
        rest = np.concatenate([rest, order.pop()])
    first, last = rest[len(rest) - before :], rest[: len(rest) - before]
    return np.concatenate([first, *order, last]).astype(np.int64)


def make_order(name: str, *, seed: int, group: int) -> Order:
    """order(lengths, epoch) of a name in choices.ORDER_CHOICES; group: samples per global batch."""
    orders: dict[str, Order] = {
        "shuffled": functools.partial(shuffled, seed=seed),
        "short-to-long": short_to_long,
        BUCKETED: functools.partial(bucketed, seed=seed, group=group),
    }
    return orders[name]
