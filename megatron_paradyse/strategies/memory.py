"""Bytes of tensors that an operation keeps, allocates at its peaks, and sends: measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_paradyse.strategies.collectives import count_communication


@dataclass(frozen=True)
class Measured:
    """As sizes.Costs has them, of this rank."""

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    forward_sent_bytes: int
    backward_sent_bytes: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage allocated inside, while it lives.

    Sees what operations return, on any device, fake tensors too; not what they allocate inside.
    """

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()
        self._seen = {t.untyped_storage()._cdata for t in known}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def measure(
    run: Callable[[], Tensor],
    x: Tensor,
    parameters: Sequence[Tensor],
    grad: Tensor,
    *,
    others: Sequence[Tensor] = (),
) -> Measured:
    """run() computes something of x and the parameters; `grad` is the gradient of its result.

    `others` are tensors that run() reads and does not make (angles of RoPE). Only x counts as kept
    if it is.
    """
    elsewhere = {t.untyped_storage()._cdata for t in (*parameters, *others)}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in elsewhere:
            kept[storage._cdata] = storage.nbytes()
        return t

    tracker = LiveBytes([x, grad, *parameters, *others])
    with tracker, count_communication() as forward_sent, saved_tensors_hooks(pack, lambda t: t):
        output = run()
    forward_peak, live = tracker.peak, tracker.live  # live: kept, and the output
    tracker.peak = 0
    with tracker, count_communication() as backward_sent:
        grads = torch.autograd.grad(output, [x, *parameters], grad)
    del grads
    return Measured(
        kept_bytes=sum(kept.values()),
        forward_bytes=forward_peak - (live - output.nbytes),
        backward_bytes=tracker.peak - live,
        forward_sent_bytes=forward_sent.total_bytes,
        backward_sent_bytes=backward_sent.total_bytes,
    )
