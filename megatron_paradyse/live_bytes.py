"""Bytes of tensors that are alive, and their peak: on a GPU the allocator's, on a CPU counted.

Both meters have the same face: `with meter:` around what is to be seen, live_bytes, peak_bytes and
reset_peak(). A GPU's meter sees everything always.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SETTLE_STEPS, SETTLE_SECONDS, SETTLED_AFTER = 50, 0.001, 4


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation inside allocates or first touches, while it lives.

    A storage made outside is counted when an operation inside first returns a view of it; those in
    `known` never are. What a kernel or a collective allocates for itself is not seen.

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

    def settled_bytes(self) -> int:
        """live_bytes, once gloo's threads have let go of the buffers of collectives that ended."""
        unchanged, last = 0, self.live_bytes
        for _ in range(SETTLE_STEPS):
            time.sleep(SETTLE_SECONDS)
            unchanged = unchanged + 1 if self.live_bytes == last else 0
            last = self.live_bytes
            if unchanged == SETTLED_AFTER:
                break
        return last

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
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, size).atexit = False
        if self._limit_bytes is not None and self.live_bytes > self._limit_bytes:
            self._refuse(size, self._limit_bytes)

    def _refuse(self, size: int, limit_bytes: int) -> None:
        """Out of memory, unless collectives that ended let go of enough."""
        if self.settled_bytes() > limit_bytes:
            raise torch.OutOfMemoryError(
                f"the emulated memory of {limit_bytes:,} bytes is full: "
                f"{self.live_bytes:,} bytes are alive, {size:,} of them just asked for"
            )

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= size


class AllocatedBytes:
    """The CUDA caching allocator's own count of bytes in use on the current device."""

    def __enter__(self) -> AllocatedBytes:
        return self

    def __exit__(self, *error) -> None: ...

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_stats().get("allocated_bytes.all.current", 0)

    def settled_bytes(self) -> int:
        torch.cuda.synchronize()
        return self.live_bytes

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
