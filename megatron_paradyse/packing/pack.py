"""From the documents of a global batch to the microbatches of every data-parallel replica.

Everything here depends on the arguments alone: each rank arrives at the same microbatches without a
message, from the lengths in the index of the data.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_paradyse.packing.groups import filled_up, like_lengths
from megatron_paradyse.packing.placement import place
from megatron_paradyse.packing.row import Row
from megatron_paradyse.packing.work import scores_between, scores_per_rank

SAMPLED = 12  # rows by which a budget is judged


@dataclass(frozen=True)
class Costs:
    """Predicted seconds of microbatches over the whole model, forward and backward.

    row: of a packed one; None where it does not fit. alone: of one document, by its tokens; fits:
    whether that fits.
    """

    row: Callable[[Row], float | None]
    alone: Callable[[int], float]
    fits: Callable[[int], bool] = lambda tokens: True


@dataclass(frozen=True)
class Grid:
    """What microbatches are made for.

    hidden_size: of the model. alignment: s is a multiple of it, and it of p. multiple_of: what
    the number of a replica's microbatches is. stages: of the pipeline. window: as place takes it.
    spread: how many replicas, whose number is a multiple of it, may share a row. groups: how many
    do share each; p, alignment and num_replicas are then of all of these together.
    """

    p: int
    hidden_size: int
    num_replicas: int = 1
    alignment: int = 1
    causal: bool = True
    multiple_of: int = 1
    stages: int = 1
    window: int | None = None
    spread: int = 1
    groups: int = 1

    @property
    def wide(self) -> Grid:
        """Of rows that `spread` replicas share."""
        return replace(
            self,
            p=self.p * self.spread,
            num_replicas=self.num_replicas // self.spread,
            alignment=self.alignment * self.spread,
            spread=1,
            groups=self.spread,
        )

    def work(self, tokens: int) -> float:
        """FLOPs of a document, in tokens of linear layers: 24 h^2 a token, 4 h a score."""
        scores = scores_between(tokens, 0, tokens, self.causal, self.window)
        return tokens + scores / (6 * self.hidden_size)


@dataclass(frozen=True)
class Microbatch:
    """documents: indices into the global batch, in the order of the row's lengths.

    row None: one document, not packed. fits: whether it is known not to; of a row it does.
    """

    documents: tuple[int, ...]
    row: Row | None
    seconds: float
    fits: bool = True


@dataclass(frozen=True)
class Packing:
    """The microbatches of each replica, of each the same number; a budget of tokens made them.

    Wide rows come first, at the same places in every replica of those that share them. seconds:
    predicted for the slowest replica.
    """

    replicas: tuple[tuple[Microbatch, ...], ...]
    tokens: int
    seconds: float


def flops_costs(grid: Grid) -> Costs:
    """Where nothing better is known: the work of the fullest rank. Everything fits."""

    def row_work(row: Row) -> float:
        fullest = max(scores_per_rank(row, causal=grid.causal, window=grid.window))
        return row.seq_length / row.p + fullest / (6 * grid.hidden_size)

    return Costs(row_work, lambda tokens: grid.work(tokens) / grid.p)


def pack(lengths: Sequence[int], tokens: int | None, grid: Grid, costs: Costs) -> Packing:
    """The microbatches that take the slowest replica the least predicted time.

    tokens: of a microbatch at most; None: what is predicted to be fastest. Documents of like
    lengths share microbatches, or long ones are filled up with short ones: whichever is predicted
    to be faster. A longer document is a microbatch of its own; a row that does not fit is halved
    until it does. grid.spread is for pack_wide (wide.py).
    """
    if tokens is None:
        return _of_best_budget(lengths, grid, costs)
    makers = (like_lengths, filled_up)
    made = [_packing(lengths, groups(lengths, tokens), tokens, grid, costs) for groups in makers]
    return min(made, key=lambda packing: packing.seconds)


def _of_best_budget(lengths: Sequence[int], grid: Grid, costs: Costs) -> Packing:
    """The best of the two budgets that are predicted to be fastest by a few of their rows."""
    total = sum(lengths)
    first = max(grid.alignment, 1 << (total // len(lengths)).bit_length())  # above the mean
    budgets = [
        first << i for i in range(40) if i == 0 or first << i < 2 * total // grid.num_replicas
    ]
    found = []
    for tokens in budgets:
        seconds = _sampled_seconds(lengths, tokens, grid, costs)
        if seconds is None:
            break  # longer rows will not fit either
        found.append((seconds, tokens))
    best = sorted(found)[:2] or [(0.0, first)]
    made = [pack(lengths, tokens, grid, costs) for _, tokens in best]
    return min(made, key=lambda packing: (packing.seconds, packing.tokens))


def _sampled_seconds(lengths: Sequence[int], tokens: int, grid: Grid, costs: Costs) -> float | None:
    """Of all microbatches, by one of every few neighbours; None where a row does not fit."""
    groups = like_lengths(lengths, tokens)
    work = [sum(grid.work(lengths[number]) for number in group) for group in groups]
    each, seconds = -(-len(groups) // SAMPLED), 0.0
    for start in range(0, len(groups), each):
        stop = min(start + each, len(groups))
        middle = (start + stop) // 2
        made = _priced(lengths, groups[middle], grid=grid, costs=costs)
        if made is None:
            return None
        seconds += made.seconds * sum(work[start:stop]) / work[middle]
    return seconds


def _packing(
    lengths: Sequence[int], groups: list[list[int]], tokens: int, grid: Grid, costs: Costs
) -> Packing:
    price = functools.partial(_priced, lengths, grid=grid, costs=costs)
    microbatches = [made for group in groups for made in _that_fit(group, lengths, price)]
    microbatches = _whole_rounds(microbatches, lengths, grid, price)
    replicas = deal(microbatches, [0.0] * grid.num_replicas)
    return Packing(replicas, tokens, slowest_seconds(replicas, grid.stages))


def slowest_seconds(replicas: Sequence[Sequence[Microbatch]], stages: int) -> float:
    """Of the slowest replica; all wait for the longest microbatch in each stage but one."""
    waits = (stages - 1) * max(made.seconds for replica in replicas for made in replica)
    slowest = max(sum(made.seconds for made in replica) for replica in replicas)
    return (slowest + waits) / stages


def _priced(
    lengths: Sequence[int], group: Sequence[int], *, grid: Grid, costs: Costs
) -> Microbatch | None:
    """None where it does not fit."""
    documents = tuple(sorted(group))
    of_row = [lengths[number] for number in documents]
    if len(documents) == 1 and grid.groups == 1:
        return Microbatch(documents, None, costs.alone(*of_row))
    row = place(of_row, grid.p, causal=grid.causal, alignment=grid.alignment, window=grid.window)
    if grid.groups > 1:
        row = replace(row, groups=grid.groups)
    seconds = costs.row(row)
    if seconds is None and len(documents) == 1:
        return Microbatch(documents, row, costs.alone(*of_row) / grid.groups, fits=False)
    return None if seconds is None else Microbatch(documents, row, seconds)


Price = Callable[[Sequence[int]], Microbatch | None]


def _that_fit(group: list[int], lengths: Sequence[int], price: Price) -> list[Microbatch]:
    """The group as one microbatch, or halves of it, as long as these do not fit."""
    made = price(group)
    if made is not None:
        return [made]
    return [one for half in _halves(group, lengths) for one in _that_fit(half, lengths, price)]


def _halves(group: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of about the same tokens; each has a document."""
    halves: tuple[list[int], list[int]] = ([], [])
    held = [0, 0]
    for number in sorted(group, key=lambda number: (-lengths[number], number)):
        less = int(held[1] < held[0])
        halves[less].append(number)
        held[less] += lengths[number]
    return halves


def _whole_rounds(
    microbatches: list[Microbatch], lengths: Sequence[int], grid: Grid, price: Price
) -> list[Microbatch]:
    """As many for every replica, for which those that take longest and can are cut in two.

    A half of a row that fits need not fit, where a document of it lies on more ranks: then into as
    many as do.
    """
    heap = [(-made.seconds, made.documents, made) for made in microbatches]
    heapq.heapify(heap)
    alone: list[Microbatch] = []
    while len(alone) + len(heap) < _whole_rounds_of(len(alone) + len(heap), len(lengths), grid):
        _, documents, made = heapq.heappop(heap)
        if len(documents) == 1:
            alone.append(made)
            continue
        for half in _halves(documents, lengths):
            for smaller in _that_fit(half, lengths, price):
                heapq.heappush(heap, (-smaller.seconds, smaller.documents, smaller))
    found = [*alone, *(made for _, _, made in heap)]
    assert len(found) % grid.num_replicas == 0, "a global batch has a document for every microbatch"
    return found


def _whole_rounds_of(count: int, num_documents: int, grid: Grid) -> int:
    """So many microbatches, or the next number that is the same for every replica."""
    rounds = -(-count // (grid.num_replicas * grid.multiple_of)) * grid.multiple_of
    return min(rounds, num_documents // grid.num_replicas) * grid.num_replicas


def deal(
    microbatches: Iterable[Microbatch], spent: Sequence[float]
) -> tuple[tuple[Microbatch, ...], ...]:
    """The longest-running first to the replica with the least to do so far that has room.

    spent: seconds that each replica has to do besides. Within a replica they are in the order of
    the global batch.
    """
    microbatches = list(microbatches)
    rounds = len(microbatches) // len(spent)
    dealt: list[list[Microbatch]] = [[] for _ in spent]
    load = [(seconds, replica) for replica, seconds in enumerate(spent)]
    heapq.heapify(load)
    for made in sorted(microbatches, key=lambda made: (-made.seconds, made.documents)):
        seconds, replica = heapq.heappop(load)
        dealt[replica].append(made)
        if len(dealt[replica]) < rounds:
            heapq.heappush(load, (seconds + made.seconds, replica))
    return tuple(tuple(sorted(own, key=lambda made: made.documents)) for own in dealt)
