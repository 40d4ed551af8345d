"""Weight blocks on their way through the group, one in use while the next is under way.

A block is what one rank holds of a layer's weights, packed into one flat buffer. Blocks travel in
buffers of their own: a parameter is read, never sent from, received into or overwritten.

    circulate          each rank at another block: they hop around the ring
    broadcast_blocks   all ranks at the same block: its owner broadcasts it
    SumsToOwners       the dual of broadcast_blocks: an owner gets the sum of all ranks' gradients
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies import sizes, transport
from megatron_paradyse.strategies.collectives import Pending, record, ring_exchange_async

Block = tuple[Tensor, ...]


def pack(block: Block) -> Tensor:
    """A new flat buffer with the values of all tensors of the block."""
    assert len({tensor.dtype for tensor in block}) == 1, "weights and biases of one dtype"
    return torch.cat([tensor.reshape(-1) for tensor in block])


def unpack(flat: Tensor, like: Block) -> Block:
    """Views of a flat buffer, with the shapes of `like`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True))


def new_packed(like: Block, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised buffer for such a block, in its dtype or another."""
    return like[0].new_empty(sum(tensor.numel() for tensor in like), dtype=dtype)


def circulate(own: Block, group: ProcessGroup, *, own_last: bool = False) -> Iterator[Block]:
    """Yield every rank's block: r, r-1, ..., r+1, or own_last r-1, ..., r+1, r. Sends p-1 blocks.

    Whoever iterates lets go of a block before asking for the next: two buffers are alive then.
    """
    p = group.size()
    coming = ring_exchange_async(pack(own), group) if p > 1 else None
    if not own_last:
        yield own
    for step in range(1, p):
        assert coming is not None
        flat = coming.wait()
        coming = ring_exchange_async(flat, group) if step < p - 1 else None
        block = unpack(flat, own)
        del flat
        yield block
        del block
    if own_last:
        yield own


def broadcast_blocks(own: Block, group: ProcessGroup) -> Iterator[tuple[int, Block]]:
    """Yield (owner, block) for ranks 0, 1, ..., p-1, the same at once on every rank.

    The first is under way when this returns. Counted as p-1 blocks sent by each rank. Two buffers
    are alive, as in circulate.
    """
    return _broadcast_rest(_begin_broadcast(own, group, 0), own, group)


def _broadcast_rest(
    coming: Pending, own: Block, group: ProcessGroup
) -> Iterator[tuple[int, Block]]:
    p = group.size()
    for owner in range(p):
        flat = coming.wait()
        if owner + 1 < p:
            coming = _begin_broadcast(own, group, owner + 1)
        block = own if p == 1 else unpack(flat, own)
        del flat
        yield owner, block
        del block


def _begin_broadcast(own: Block, group: ProcessGroup, owner: int) -> Pending:
    if group.size() == 1:
        return Pending(own[0])
    mine = owner == group.rank()
    flat = pack(own) if mine else new_packed(own)
    record("broadcast", (group.size() - 1) * flat.nbytes if mine else 0)
    return Pending(flat, transport.broadcast(flat, group, owner=owner))


def reduce_async(x: Tensor, group: ProcessGroup, *, owner: int) -> Pending:
    """Sum x into group rank `owner`, in place; x is spoilt elsewhere. All but the owner send x."""
    if group.size() == 1:
        return Pending(x)
    record("reduce", 0 if owner == group.rank() else x.nbytes)
    return Pending(x, transport.reduce(x, group, owner=owner))


class SumsToOwners:
    """Gradients of all blocks, each summed into its owner, while the next one is computed."""

    def __init__(self, group: ProcessGroup):
        self._group = group
        self._owner = -1
        self._pending: Pending | None = None
        self._own: Tensor | None = None

    def begin(self, grad_block: Tensor, owner: int) -> None:
        self._finish()
        self._owner, self._pending = owner, reduce_async(grad_block, self._group, owner=owner)

    def _finish(self) -> None:
        if self._pending is None:
            return
        total, self._pending = self._pending.wait(), None
        if self._owner == self._group.rank():
            self._own = total

    def result(self) -> Tensor:
        """The sum for this rank's own block."""
        self._finish()
        assert self._own is not None
        return self._own


def set_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a b, with out of the same or of a wider dtype. Two-dimensional."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def add_product_(total: Tensor, a: Tensor, b: Tensor, *, anew: bool = False) -> None:
    """total += a b, with total of the same or of a wider dtype. Two-dimensional.

    Of a wider dtype in pieces of TILE_ROWS rows, so that no more of the product is there at once.
    anew: total has no values yet, and is set.
    """
    if total.dtype == a.dtype:
        if anew:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
        return
    for part, rows in zip(total.split(sizes.TILE_ROWS), a.split(sizes.TILE_ROWS), strict=True):
        if anew:
            part.copy_(rows @ b)
        else:
            part.add_(rows @ b)
