"""Watch the tensors that code makes: the bytes alive, their peak, and every shape."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside `with LiveBytes(inputs)`, counts the storages that come and go; inputs count nothing.

    Real or fake tensors. What a kernel allocates and frees within one call stays unseen.
    """

    def __init__(self, inputs: Iterable[Tensor | None] = ()):
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.shapes: set[torch.Size] = set()
        self._inputs = [x.untyped_storage() for x in inputs if x is not None]
        self._known = {storage._cdata for storage in self._inputs}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.shapes.add(leaf.shape)
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= num_bytes
