"""Keys and values that few queries see: each goes straight to the ranks whose queries see it.

So of packed documents, and within a narrow window (sizes.is_narrow). Where a ring passes every
chunk through every rank, step i of p-1 sends from rank r to rank r+i what that rank's queries see
of r's chunk, and nothing where they see nothing. Gradients go back the same way one step later.
Every rank finds the same routes from the microbatch, and takes the steps in the same order, whether
or not it has a part in them: no order of sends can deadlock. Steps that are nobody's are left out:
within a window, those beyond the ranks that it reaches back to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies.blocks import Span, plan_blocks, sends_what_is_seen
from megatron_paradyse.strategies.collectives import Pending, uneven_exchange_async
from megatron_paradyse.strategies.local_attention import AttentionTask
from megatron_paradyse.strategies.ring import TravellingGradient, ring_chunks

Ranges = tuple[tuple[int, int], ...]
SpansOfRanks = tuple[tuple[Span, ...], ...]


class Gradient(Protocol):
    """Of a rank's own chunk, summed over all ranks that use it."""

    def add(self, grad: Tensor) -> None:
        """This rank's part of the gradient of a chunk, in the order of chunks()."""
        ...

    def home(self) -> Tensor: ...


class Exchange(Protocol):
    """Chunks of all ranks that reach this one, and the way back of their gradients.

    spans_from[i]: the positions of what comes from rank i. is_alone: nothing comes or is sent.
    """

    spans_from: SpansOfRanks
    is_alone: bool

    def chunks(self, own: Tensor, *, backward: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, what comes from it), the own chunk among them.

        Whoever iterates lets go of a chunk before asking for the next. backward: gradient().add is
        called for every one.
        """
        ...

    def gradient(self) -> Gradient: ...


def exchange_among(
    spans_of_ranks: SpansOfRanks, task: AttentionTask, group: ProcessGroup, *, dim: int
) -> Exchange:
    """The exchange of chunks whose rows, along dim, hold the positions spans_of_ranks[rank]."""
    if sends_what_is_seen(task.shape, task.microbatch, group.size()):
        return _Routed(spans_of_ranks, task, group, dim)
    return _FullRing(spans_of_ranks, group)


class _FullRing:
    """Every chunk to every rank."""

    def __init__(self, spans_of_ranks: SpansOfRanks, group: ProcessGroup):
        self.spans_from, self._group = spans_of_ranks, group
        self.is_alone = group.size() == 1

    def chunks(self, own: Tensor, *, backward: bool = False) -> Iterator[tuple[int, Tensor]]:
        return ring_chunks(own, self._group, own_last=backward)

    def gradient(self) -> Gradient:
        return TravellingGradient(self._group)


@dataclass(frozen=True)
class _Step:
    """What this rank sends to one rank, and what positions it receives from another."""

    to: int
    rows: Ranges  # of the own chunk
    source: int
    spans: tuple[Span, ...]

    @property
    def num_received(self) -> int:
        return sum(map(len, self.spans))


class _Routed:
    def __init__(
        self, spans_of_ranks: SpansOfRanks, task: AttentionTask, group: ProcessGroup, dim: int
    ):
        shape, microbatch, rank = task.shape, task.microbatch, group.rank()
        p, most = group.size(), group.size() - 1
        if microbatch.shards is None:  # a narrow window: no query sees keys of ranks farther away
            assert shape.window is not None
            most = -(-(shape.window - 1) // (microbatch.seq_length // p))
        mask = (microbatch.documents, microbatch.batch_size, shape.causal, shape.window)
        self._steps = _steps(spans_of_ranks, rank, most, *mask)
        self.is_alone = not any(step.rows or step.spans for step in self._steps)
        self._group, self._dim = group, dim
        spans = {step.source: step.spans for step in self._steps} | {rank: spans_of_ranks[rank]}
        self.spans_from = tuple(spans.get(source, ()) for source in range(p))

    def chunks(self, own: Tensor, *, backward: bool = False) -> Iterator[tuple[int, Tensor]]:
        """The own chunk first. Alive besides it: what is used, what comes, and what is sent."""
        coming = self._begin(0, own)
        yield self._group.rank(), own
        for i, step in enumerate(self._steps):
            assert coming is not None
            chunk = coming.wait()
            coming = self._begin(i + 1, own)
            yield step.source, chunk
            del chunk

    def _begin(self, i: int, own: Tensor) -> Pending | None:
        if i == len(self._steps):
            return None
        step = self._steps[i]
        into = _new_rows(own, step.num_received, self._dim)
        rows = _take_rows(own, step.rows, self._dim)
        return uneven_exchange_async(rows, into, self._group, to=step.to, source=step.source)

    def gradient(self) -> Gradient:
        return _ReturningGradient(self._steps, self._group, self._dim)


class _ReturningGradient:
    """Gradients of received chunks go back to their owners, who add them to their own part."""

    def __init__(self, steps: tuple[_Step, ...], group: ProcessGroup, dim: int):
        self._steps, self._group, self._dim = iter(steps), group, dim
        self._sum: Tensor | None = None
        self._coming: tuple[_Step, Pending] | None = None

    def add(self, grad: Tensor) -> None:
        if self._sum is None:
            self._sum = grad
            return
        self._collect()
        step = next(self._steps)
        into = _new_rows(grad, sum(stop - start for start, stop in step.rows), self._dim)
        pending = uneven_exchange_async(grad, into, self._group, to=step.source, source=step.to)
        self._coming = step, pending

    def _collect(self) -> None:
        if self._coming is None:
            return
        (step, pending), self._coming = self._coming, None
        assert self._sum is not None
        arrived, first = pending.wait(), 0
        for start, stop in step.rows:
            part = arrived.narrow(self._dim, first, stop - start)
            self._sum.narrow(self._dim, start, stop - start).add_(part)
            first += stop - start

    def home(self) -> Tensor:
        self._collect()
        assert self._sum is not None
        return self._sum


def _new_rows(like: Tensor, num_rows: int, dim: int) -> Tensor:
    size = list(like.shape)
    size[dim] = num_rows
    return like.new_empty(size)


def _take_rows(x: Tensor, rows: Ranges, dim: int) -> Tensor:
    """These rows of x, contiguous; x itself if they are all."""
    if rows == ((0, x.shape[dim]),):
        return x
    parts = [x.narrow(dim, start, stop - start) for start, stop in rows]
    return torch.cat(parts, dim) if parts else _new_rows(x, 0, dim)


@lru_cache(maxsize=256)
def _steps(spans_of_ranks: SpansOfRanks, rank: int, most: int, *mask) -> tuple[_Step, ...]:
    """So many steps at most. mask: documents, batch size, causal and window, as plan_blocks takes
    them."""
    p = len(spans_of_ranks)
    steps = []
    for i in range(1, min(p - 1, most) + 1):
        to, source = (rank + i) % p, (rank - i) % p
        rows = _rows_seen(spans_of_ranks[to], spans_of_ranks[rank], *mask)
        coming = _rows_seen(spans_of_ranks[rank], spans_of_ranks[source], *mask)
        steps.append(_Step(to, rows, source, _spans_of_rows(spans_of_ranks[source], coming)))
    return tuple(steps)


def _rows_seen(q_spans: tuple[Span, ...], k_spans: tuple[Span, ...], *mask) -> Ranges:
    """The rows of k_spans that some query of q_spans sees, ascending."""
    seen: list[tuple[int, int]] = []
    for start, stop in sorted({block.k_rows for block in plan_blocks(q_spans, k_spans, *mask)}):
        if seen and start <= seen[-1][1]:
            seen[-1] = seen[-1][0], max(seen[-1][1], stop)
        else:
            seen.append((start, stop))
    return tuple(seen)


def _spans_of_rows(spans: tuple[Span, ...], rows: Ranges) -> tuple[Span, ...]:
    """The spans of a buffer that holds these rows, ascending, of a chunk with `spans`."""
    parts: list[Span] = []
    first = 0
    for span in spans:
        for start, stop in rows:
            low, high = max(start, span.row), min(stop, span.row + len(span))
            if low < high:
                position = span.start + low - span.row
                parts.append(Span(first, position, position + high - low))
                first += high - low
    return tuple(parts)
