"""Long rings, walked only at their ends: the steps between are alike, and counted instead.

A ring of p chunks repeats one step p-1 times, and holds no more in the tenth step than in the
fourth. So beyond WHOLE ranks a loop runs its first and last steps, and one step between stands for
all those left out: its seconds are repeated on the clock, its bytes come and go as they would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_paradyse.simulator.clock import Clock
from megatron_paradyse.strategies import colossal_z, ring, ring_attention

WHOLE = 8
AT_START, AT_END = 3, 2


class _ShortGradient(ring.TravellingGradient):
    """Hops as often as a shortened ring has steps."""

    def __init__(self, group: ProcessGroup):
        super().__init__(group)
        self._hops_left = min(self._hops_left, AT_START + AT_END)


@contextlib.contextmanager
def short_rings(clock: Clock) -> Iterator[None]:
    """Rings of attention over more than WHOLE ranks take AT_START + AT_END hops and a count."""

    def ring_chunks(
        own: Tensor, group: ProcessGroup, *, own_last: bool = False
    ) -> Iterator[tuple[int, Tensor]]:
        p, rank = group.size(), group.rank()
        coming = ring.ring_exchange_async(own, group) if p > 1 else None
        if not own_last:
            yield rank, own
        steps = [*range(1, 1 + AT_START), *range(p - AT_END, p)]
        for step in steps:
            assert coming is not None
            since = clock.lines
            chunk = coming.wait()
            coming = ring.ring_exchange_async(chunk, group) if step < p - 1 else None
            yield (rank - step) % p, chunk
            del chunk
            if step == AT_START:
                clock.repeat(since, p - 1 - len(steps))
        if own_last:
            yield rank, own

    def chosen(own, group, *, own_last=False):
        long = group.size() > WHOLE
        return (ring_chunks if long else ring.ring_chunks)(own, group, own_last=own_last)

    def gradient(group):
        return (_ShortGradient if group.size() > WHOLE else ring.TravellingGradient)(group)

    before = [
        (module, name, getattr(module, name))
        for module in (ring_attention, colossal_z)
        for name in ("ring_chunks", "TravellingGradient")
    ]
    try:
        for module, name, _ in before:
            setattr(module, name, chosen if name == "ring_chunks" else gradient)
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)
