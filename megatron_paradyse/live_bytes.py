"""Bytes of tensors that are alive, and their peak: on a GPU the allocator's, on a CPU counted.

Both meters have the same face: `with meter:` around what is to be seen, live_bytes, peak_bytes and
reset_peak(). A GPU's meter sees everything always.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Of torch.ops.c10d, those that gloo does not hand to a thread of its own.
_IN_THE_CALLER = ("send", "recv_", "recv_any_source_", "barrier", "monitored_barrier_")


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation inside allocates or first touches, while it lives.

    A storage made outside is counted when an operation inside first returns a view of it; those in
    `known` never are. What a kernel or a collective allocates for itself is not seen.

    gloo's threads let go of a collective's buffers when they come to it, which may be several
    operations after it has ended; and waiting for a reduce_scatter shows the copy of its input that
    gloo made. So that the count is the program's alone and the same every time, a collective inside
    runs at once, on copies that are not counted, and has ended when the program gets its work.
    Sends and receives have no thread and no copies: they stay as they are.

    limit_bytes: an emulated memory; an operation whose result does not fit raises
    torch.OutOfMemoryError.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, limit_bytes: int | None = None):
        super().__init__()
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self._limit_bytes = limit_bytes
        self.live_bytes = self.peak_bytes = 0

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._schema.name[6:] not in _IN_THE_CALLER:
            return _run_on_copies(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):  # as most are: told without looking through a tree
            self._see(result.untyped_storage())
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, size).atexit = False
        if self._limit_bytes is not None and self.live_bytes > self._limit_bytes:
            self._refuse(size, self._limit_bytes)

    def _refuse(self, size: int, limit_bytes: int) -> None:
        raise torch.OutOfMemoryError(
            f"the emulated memory of {limit_bytes:,} bytes is full: {self.live_bytes:,} bytes are "
            f"alive, {size:,} of them just asked for"
        )

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= size


def _run_on_copies(collective, args: tuple, kwargs: dict[str, Any]):
    """collective(*args), ended, with copies in the place of its tensors; its work does nothing.

    The first argument of every c10d operation holds what it writes; only that is copied back, so
    that an output may be a part of the input, and without a new version for autograd.
    """
    copies: dict[int, Tensor] = {}
    given: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone()
            given[id(copies[id(tensor)])] = tensor
        return copies[id(tensor)]

    def end(work: torch.ScriptObject) -> torch.ScriptObject:
        Work.unbox(work).wait()
        return FakeWork().boxed()

    result = collective(*tree_map_only(Tensor, copy, args), **kwargs)
    result = tree_map_only(torch.ScriptObject, end, result)
    for leaf in tree_leaves(args[0]):
        if isinstance(leaf, Tensor):
            leaf.data.copy_(copies[id(leaf)])
    return tree_map_only(Tensor, lambda tensor: given.get(id(tensor), tensor), result)


class AllocatedBytes:
    """The CUDA caching allocator's own count of bytes in use on the current device."""

    def __enter__(self) -> AllocatedBytes:
        return self

    def __exit__(self, *error) -> None: ...

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_stats().get("allocated_bytes.all.current", 0)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.memory_stats().get("allocated_bytes.all.peak", 0)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


Meter = LiveBytes | AllocatedBytes


def make_meter(*, limit_bytes: int | None = None) -> Meter:
    """The meter of this machine's device; limit_bytes is enforced on a CPU only."""
    if torch.cuda.is_available():
        return AllocatedBytes()
    return LiveBytes(limit_bytes=limit_bytes)
