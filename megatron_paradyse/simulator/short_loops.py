"""Long loops, walked only at their ends: the steps between are alike, and counted instead.

A ring of p chunks repeats one step p-1 times, and holds no more in the tenth step than in the
fourth. So beyond WHOLE ranks a loop runs its first and last steps, and one step between stands for
all those left out: its seconds are repeated on the clock, its bytes come and go as they would. The
same holds for the tiles of embedding, head and MLP beyond WHOLE tiles. Not for the ring of an
attention with a window, whose steps see keys or none.

METP has a ring for every rank's block of heads, all alike: those between its first and its last
blocks take the seconds of the one before, and give tensors of the right size. So do those between
the second and the last key head of a block that goes head by head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_paradyse.doors import Door, opened
from megatron_paradyse.edges import cross_entropy, embedding
from megatron_paradyse.simulator.clock import Clock
from megatron_paradyse.strategies import (
    colossal_z,
    metp_attention,
    ring,
    ring_attention,
    routes,
    tiled_mlp,
    zero_tiles,
)
from megatron_paradyse.strategies.blocks import sends_what_is_seen
from megatron_paradyse.strategies.local_attention import AttentionTask, accumulation_dtype
from megatron_paradyse.strategies.routes import SpansOfRanks

WHOLE = 7
AT_START, AT_END = 3, 2


class _ShortGradient(ring.TravellingGradient):
    """Hops as often as a shortened ring has steps."""

    def __init__(self, group: ProcessGroup):
        super().__init__(group)
        self._hops_left = min(self._hops_left, AT_START + AT_END)


class _ShortRing:
    """Every chunk to every rank (routes.Exchange), of which the steps between stand for another."""

    def __init__(self, spans_of_ranks: SpansOfRanks, group: ProcessGroup, clock: Clock):
        self.spans_from, self._group, self._clock = spans_of_ranks, group, clock
        self.is_alone = False

    def chunks(self, own: Tensor, *, backward: bool = False) -> Iterator[tuple[int, Tensor]]:
        p, rank = self._group.size(), self._group.rank()
        coming = ring.ring_exchange_async(own, self._group)
        if not backward:
            yield rank, own
        steps = [*range(1, 1 + AT_START), *range(p - AT_END, p)]
        for step in steps:
            since = self._clock.lines
            chunk = coming.wait()
            if step < p - 1:
                coming = ring.ring_exchange_async(chunk, self._group)
            yield (rank - step) % p, chunk
            del chunk
            if step == AT_START:
                self._clock.repeat(self._clock.since(since), p - 1 - len(steps))
        if backward:
            yield rank, own

    def gradient(self) -> _ShortGradient:
        return _ShortGradient(self._group)


def _few_blocks(function: Callable, empty: Callable, clock: Clock) -> Callable:
    """METP's ring attention, run for the first and last blocks of heads of a large group only.

    And for the first two and the last parts of a block.
    """
    gains = (0.0, 0.0, 0.0)

    def run(*tensors, task, group, **ring):
        nonlocal gains
        p = group.size()
        per_block, heads = task.shape.num_heads // p, tensors[0].shape[2]
        owner, first = divmod(task.first_head, per_block)
        between = p > WHOLE and AT_START <= owner < p - AT_END
        many = per_block // heads * p > WHOLE
        if between or (many and heads < first < per_block - heads):
            clock.repeat(gains)
            return empty(*tensors)
        before = clock.lines
        result = function(*tensors, task=task, group=group, **ring)
        gains = clock.since(before)
        return result

    return run


def _empty_outputs(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    s, b, n, _ = q.shape
    lse = q.new_empty((b, n, s), dtype=accumulation_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def _empty_gradients(grad_out: Tensor, q: Tensor, kv: Tensor, *rest: Tensor):
    return torch.empty_like(q), torch.empty_like(kv)


def _few_tiles(tiles: Callable, clock: Clock) -> Callable:
    """The first and last of many tiles; the gap between them takes the seconds of its first end.

    What asks for the next tile does so once per tile, so that from one request to the next is one
    step of its loop, wherever in the loop it asks.
    """

    def run(*arguments, **options) -> Iterator[slice]:
        every = list(tiles(*arguments, **options))
        left_out = len(every) - AT_START - AT_END if len(every) > WHOLE else 0
        for i, rows in enumerate(every):
            if left_out and AT_START <= i < AT_START + left_out:
                continue
            since = clock.lines
            yield rows
            if left_out and i == AT_START - 1:
                clock.repeat(clock.since(since), left_out)

    return run


@contextlib.contextmanager
def short_loops(clock: Clock) -> Iterator[None]:
    """Loops of more than WHOLE steps take AT_START + AT_END of them and a count."""

    def exchange_among(
        spans_of_ranks: SpansOfRanks, task: AttentionTask, group: ProcessGroup, *, dim: int
    ) -> routes.Exchange:
        every, window = task.microbatch.seq_length, task.shape.window
        alike = window is None or window >= every  # else some steps see more keys than others
        if (
            group.size() > WHOLE
            and alike
            and not sends_what_is_seen(task.shape, task.microbatch, group.size())
        ):
            return _ShortRing(spans_of_ranks, group, clock)
        return routes.exchange_among(spans_of_ranks, task, group, dim=dim)

    doors: list[Door] = [
        (module, "exchange_among", exchange_among) for module in (ring_attention, colossal_z)
    ]
    forward, backward = metp_attention.ring_forward, metp_attention.ring_backward
    doors.append((metp_attention, "ring_forward", _few_blocks(forward, _empty_outputs, clock)))
    doors.append((metp_attention, "ring_backward", _few_blocks(backward, _empty_gradients, clock)))
    doors += [
        (module, "tiles", _few_tiles(module.tiles, clock))
        for module in (cross_entropy, embedding, tiled_mlp, zero_tiles)
    ]
    with opened(doors):
        yield
