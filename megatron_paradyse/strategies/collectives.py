"""Communication on an explicit group: all_gather, reduce_scatter, all_to_all, ring exchange.

The rank's part lies along dim 0. Every buffer is allocated from an input; a group of one rank
communicates nothing and may return its input itself, so nobody writes into a result in place.

The *_async variants return a Pending, for use inside custom autograd Functions. Differentiable,
each the dual of another or of itself, are:

    gather_sequence   all_gather      <->  reduce_scatter
    scatter_sequence  reduce_scatter  <->  all_gather
    transpose_blocks  all_to_all      <->  all_to_all
    swap_halves       send/receive    <->  swap_halves_back
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies import transport
from megatron_paradyse.strategies.transport import Works


@dataclass(eq=False)  # counts inside each other are told apart
class Communication:
    """What this rank sent inside one `with count_communication()`."""

    sent_bytes: Counter[str] = field(default_factory=Counter)  # by collective
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def total_bytes(self) -> int:
        return self.sent_bytes.total()


_open_counts: list[Communication] = []


@contextmanager
def count_communication() -> Iterator[Communication]:
    """Count the calls and the bytes that this rank sends to other ranks.

    A collective is counted as the least that any algorithm sends: (p-1)/p of the larger of its
    input and output for all_gather, reduce_scatter and all_to_all, the whole message for a send.
    """
    count = Communication()
    _open_counts.append(count)
    try:
        yield count
    finally:
        _open_counts.remove(count)


def record(name: str, sent_bytes: int) -> None:
    """Add one call of a collective to the open counts."""
    for count in _open_counts:
        count.sent_bytes[name] += sent_bytes
        count.calls[name] += 1


class Pending:
    """Communication under way: wait() returns the result, once, and drops every buffer."""

    def __init__(self, result: Tensor, works: Works | None = None, source: Tensor | None = None):
        self._result: Tensor | None = result
        self._works = works or []
        self._source = source  # a buffer being sent must outlive the transfer

    def wait(self) -> Tensor:
        assert self._result is not None, "this communication was waited for before"
        for work in self._works:
            work.wait()
        result, self._result, self._works, self._source = self._result, None, [], None
        return result


def all_gather_async(x: Tensor, group: ProcessGroup) -> Pending:
    """[m, ...] on each rank -> [p m, ...], in rank order. Sends (p-1) times the bytes of x."""
    p = group.size()
    if p == 1:
        return Pending(x)
    x = x.contiguous()
    gathered = x.new_empty(p * x.shape[0], *x.shape[1:])
    record("all_gather", (p - 1) * x.nbytes)
    return Pending(gathered, transport.all_gather(gathered, x, group), x)


def reduce_scatter_async(x: Tensor, group: ProcessGroup) -> Pending:
    """[p m, ...] on each rank -> this rank's [m, ...] of the sum, in the dtype of x.

    Sends (p-1)/p of the bytes of x.
    """
    p = group.size()
    if p == 1:
        return Pending(x)
    x = x.contiguous()
    scattered = x.new_empty(x.shape[0] // p, *x.shape[1:])
    record("reduce_scatter", (p - 1) * scattered.nbytes)
    return Pending(scattered, transport.reduce_scatter(scattered, x, group), x)


def reduce_gradient_async(grad: Tensor, group: ProcessGroup) -> Pending:
    """reduce_scatter of a weight's gradient, in float32 when the gradient is of a half type.

    Each rank's partial sum is then rounded once (relative 2^-9 in bfloat16) and their sum carries
    (p-1) float32 roundings, (p-1) 2^-24, instead of (p-1) 2^-9. The result is float32 (float64 for
    float64); the caller casts it.
    """
    if group.size() > 1 and grad.dtype in (torch.bfloat16, torch.float16):
        grad = grad.float()
    return reduce_scatter_async(grad, group)


def all_to_all_async(x: Tensor, group: ProcessGroup) -> Pending:
    """[p, ...]: block i goes to rank i -> [p, ...]: block i came from rank i.

    Sends (p-1)/p of the bytes of x.
    """
    p = group.size()
    if p == 1:
        return Pending(x)
    assert x.shape[0] == p
    x = x.contiguous()
    received = torch.empty_like(x)
    record("all_to_all", (p - 1) * (x.nbytes // p))
    return Pending(received, transport.all_to_all(received, x, group), x)


def exchange_async(x: Tensor, group: ProcessGroup, *, to: int, source: int) -> Pending:
    """Send x to group rank `to` and receive as much from group rank `source`; sends x once."""
    if to == source == group.rank():
        return Pending(x)
    x = x.contiguous()
    received = torch.empty_like(x)
    record("send", x.nbytes)
    return Pending(received, transport.exchange(received, x, group, to=to, source=source), x)


def uneven_exchange_async(
    x: Tensor, into: Tensor, group: ProcessGroup, *, to: int, source: int
) -> Pending:
    """Send x to group rank `to` and receive `into` from group rank `source`.

    They may differ in size. Nothing of no size is sent, so that ranks may have nothing to do.
    """
    x = x.contiguous()
    if x.numel():
        record("send", x.nbytes)
    return Pending(into, transport.exchange(into, x, group, to=to, source=source), x)


def ring_exchange_async(x: Tensor, group: ProcessGroup) -> Pending:
    """Send x to the next rank of the ring and receive the previous rank's; sends x once."""
    p, rank = group.size(), group.rank()
    return exchange_async(x, group, to=(rank + 1) % p, source=(rank - 1) % p)


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_async(x, group).wait()


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    return reduce_scatter_async(x, group).wait()


def all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    return all_to_all_async(x, group).wait()


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group), None


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_gather(grad, ctx.group), None


class _TransposeBlocks(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_to_all(grad, ctx.group), None


class _SwapHalves(Function):
    @staticmethod
    def forward(ctx, x, group, back):
        ctx.group, ctx.back = group, back
        return _swap(x, group, back=back)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _swap(grad, ctx.group, back=not ctx.back), None, None


def _swap(x: Tensor, group: ProcessGroup, *, back: bool) -> Tensor:
    """The rank's second half against its mirror's, which in the upper ranks comes first."""
    mirror = group.size() - 1 - group.rank()
    if mirror == group.rank():
        return x
    half, first = (x.shape[0] + 1) // 2, mirror < group.rank()
    if first and back:
        sent, own = x.split((len(x) - half, half))
    else:
        own, sent = x.split((half, len(x) - half))
    received = exchange_async(sent, group, to=mirror, source=mirror).wait()
    return torch.cat((received, own) if first and not back else (own, received))


def gather_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """[s/p, ...] -> [s, ...]; backward reduce_scatters. Sends (p-1) times x, both ways."""
    return _GatherSequence.apply(x, group) if group.size() > 1 else x


def scatter_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """[s, ...] partial sums -> [s/p, ...]; backward all_gathers. Sends (p-1)/p of x, both ways."""
    return _ScatterSequence.apply(x, group) if group.size() > 1 else x


def transpose_blocks(x: Tensor, group: ProcessGroup) -> Tensor:
    """all_to_all of [p, ...], its own dual. Sends (p-1)/p of x, both ways."""
    return _TransposeBlocks.apply(x, group) if group.size() > 1 else x


def swap_halves(x: Tensor, group: ProcessGroup) -> Tensor:
    """Swap the second half of this rank's chunk with that of rank p-1-r.

    [s/p, ...] contiguous -> [s/p, ...]: first half of chunk r and second half of chunk p-1-r, in
    ascending order, whose mean position is the same on every rank. Sends half of x, both ways.
    """
    return _SwapHalves.apply(x, group, False) if group.size() > 1 else x


def swap_halves_back(x: Tensor, group: ProcessGroup) -> Tensor:
    """The inverse of swap_halves, and its dual. Sends half of x, both ways."""
    return _SwapHalves.apply(x, group, True) if group.size() > 1 else x
