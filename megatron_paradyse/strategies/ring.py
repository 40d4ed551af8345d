"""Chunks that go round a ring, each used while the next is under way, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies.collectives import Pending, ring_exchange_async


def ring_chunks(
    own: Tensor, group: ProcessGroup, *, own_last: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, its chunk) for r, r-1, ..., r+1, or own_last r-1, ..., r+1, r.

    Sends p-1 chunks. Whoever iterates lets go of a chunk before asking for the next: two buffers
    are alive then, besides the own one.
    """
    p, rank = group.size(), group.rank()
    coming = ring_exchange_async(own, group) if p > 1 else None
    if not own_last:
        yield rank, own
    for step in range(1, p):
        assert coming is not None
        chunk = coming.wait()
        coming = ring_exchange_async(chunk, group) if step < p - 1 else None
        yield (rank - step) % p, chunk
        del chunk
    if own_last:
        yield rank, own


class TravellingGradient:
    """The gradient of a chunk of ring_chunks(own_last=True), which goes one hop behind the chunk.

    The owner is the last to add, so that p-1 hops bring it home. What comes in arrives while the
    next step computes.
    """

    def __init__(self, group: ProcessGroup):
        self._group = group
        self._hops_left = group.size() - 1
        self._sum: Tensor | None = None
        self._coming: Pending | None = None

    def add(self, grad: Tensor) -> None:
        """Add this rank's part of the gradient of the chunk it holds, and send it on."""
        if self._coming is not None:
            grad += self._coming.wait()
        if self._hops_left == 0:
            self._sum = grad
            return
        self._hops_left -= 1
        self._coming = ring_exchange_async(grad, self._group)

    def home(self) -> Tensor:
        """The whole gradient of the rank's own chunk, after p steps."""
        assert self._sum is not None
        return self._sum
