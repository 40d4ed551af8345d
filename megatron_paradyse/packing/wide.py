"""The longest documents of a global batch over several replicas, which share a row.

A document that lies on the ranks of one replica alone may not fit there, or keep the others
waiting. In a wide row the replicas' ranks hold it together; each replica has all weights, so that
only keys and values cross from one to another. Megatron adds up the gradients of replicas anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from megatron_paradyse.packing.pack import Costs, Grid, Packing, deal, pack, slowest_seconds

WIDE_SHARES = (1.0, 0.5, 0.25, 0.125)  # of a replica's mean work, above which documents go wide
WIDE_GAIN = 0.05  # of the time, for which more documents do


def pack_wide(lengths: Sequence[int], tokens: int | None, grid: Grid, costs: Costs) -> Packing:
    """As pack; if grid.spread is above 1, so many replicas share rows of the longest documents.

    tokens: of a replica's microbatch at most, of a wide row so many for each replica. How many
    documents go wide is tried: the fewest that leave none that does not fit alone, and those with
    more than a share of a replica's mean work. More do where fewer then do not fit, or where the
    slowest replica is predicted to end sooner by WIDE_GAIN.
    """
    if grid.spread == 1:
        return pack(lengths, tokens, grid, costs)
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    best: Packing | None = None
    fewest_unfit: float = inf
    for count in _wide_counts([lengths[number] for number in order], grid, costs):
        made = _pack_longest_wide(lengths, order, count, tokens, grid, costs)
        rounds, unfit = len(made.replicas[0]), _num_unfit(made)
        if count and rounds % grid.multiple_of and rounds != len(lengths) // grid.num_replicas:
            continue
        gains = best is None or made.seconds < (1 - WIDE_GAIN) * best.seconds
        if unfit < fewest_unfit or (unfit == fewest_unfit and gains):
            best, fewest_unfit = made, unfit
    # Megatron's own number of microbatches is always possible.
    return best or _pack_longest_wide(lengths, order, 0, tokens, grid, costs)


def _wide_counts(lengths: Sequence[int], grid: Grid, costs: Costs) -> list[int]:
    """How many of the longest documents may go wide: a multiple of the replicas, as all are.

    At least those that do not fit alone; lengths descend. What is left gives every replica its
    microbatches, or there is nothing left.
    """
    total = len(lengths)
    work = [grid.work(length) for length in lengths]
    mean = sum(work) / grid.num_replicas
    unfit = sum(1 for _ in itertools.takewhile(lambda length: not costs.fits(length), lengths))
    counts = {unfit, *(sum(one > share * mean for one in work) for share in WIDE_SHARES)}
    if counts != {0}:
        counts.add(total)
    found = {0}
    for count in counts:
        whole = -(-count // grid.num_replicas) * grid.num_replicas
        fewest = grid.num_replicas * grid.multiple_of
        found.add(whole if total - whole >= fewest else total)
    return sorted(count for count in found if count >= unfit)


def _pack_longest_wide(
    lengths: Sequence[int],
    order: list[int],
    count: int,
    tokens: int | None,
    grid: Grid,
    costs: Costs,
) -> Packing:
    """With the first `count` of the order in wide rows, the others packed as without spread.

    These are then dealt so that, with wide rows of unlike times, the replicas are even.
    """
    parts = []
    for numbers, part, factor in (
        (sorted(order[:count]), grid.wide, grid.spread),
        (sorted(order[count:]), replace(grid, spread=1), 1),
    ):
        if numbers:
            of_part = [lengths[number] for number in numbers]
            most = None if tokens is None else tokens * factor
            parts.append(_renumbered(pack(of_part, most, part, costs), numbers, factor))
    if len(parts) == 1:
        return parts[0]
    wide, rest = (part.replicas for part in parts)
    spent = [sum(made.seconds for made in share) for share in wide]
    dealt = deal(itertools.chain(*rest), spent)
    replicas = tuple(first + then for first, then in zip(wide, dealt, strict=True))
    return Packing(replicas, parts[-1].tokens, slowest_seconds(replicas, grid.stages))


def _renumbered(packing: Packing, numbers: list[int], repeats: int) -> Packing:
    """Of documents of these numbers, ascending; each replica's microbatches so many times."""
    replicas = tuple(
        tuple(
            replace(made, documents=tuple(numbers[i] for i in made.documents)) for made in replica
        )
        for replica in packing.replicas
        for _ in range(repeats)
    )
    return replace(packing, replicas=replicas)


def _num_unfit(packing: Packing) -> int:
    """Wide rows that do not fit: of one document each, for others are halved."""
    return sum(not made.fits for made in itertools.chain(*packing.replicas))
