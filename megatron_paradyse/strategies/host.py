"""Copies of tensors in host memory: where what +offload keeps waits for its backward.

On a GPU the copy is pinned, from PyTorch's own pool of pinned memory, which hands a piece out again
when the copies that use it have ended. On a CPU it is a numpy array: host and device are one memory
there, and only the count of live bytes (live_bytes.py) tells them apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_WITHOUT_NUMPY = {torch.bfloat16: torch.int16, torch.float16: torch.int16}  # viewed as these


class HostCopy(Protocol):
    """Begins to copy a tensor when it is made; the tensor must live until finish() returns."""

    def finish(self) -> None:
        """What runs after this, in the order of the device, may overwrite the tensor."""

    def back(self) -> Tensor:
        """A new tensor on the device with the values copied."""
        ...


class PinnedCopy:
    """In pinned memory, through a stream of its own: kernels run on beside the copy."""

    def __init__(self, tensor: Tensor):
        stream = _copy_stream(tensor.device)
        self._device = tensor.device
        self._pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))  # the tensor is made there
        with torch.cuda.stream(stream):
            self._pinned.copy_(tensor.detach(), non_blocking=True)
        self._done = stream.record_event()

    def finish(self) -> None:
        # The stream waits, not the host. What is freed from here on is reused after the copy, so
        # that the caching allocator need not be told of the other stream (record_stream), and the
        # bytes are free at once.
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def back(self) -> Tensor:
        # On the stream of the kernels, which need it next.
        tensor = torch.empty(self._pinned.shape, dtype=self._pinned.dtype, device=self._device)
        return tensor.copy_(self._pinned, non_blocking=True)


class ArrayCopy:
    """In a numpy array."""

    def __init__(self, tensor: Tensor):
        self._dtype = tensor.dtype
        self._array = _as_array(tensor.detach()).copy()

    def finish(self) -> None: ...

    def back(self) -> Tensor:
        tensor = torch.empty(self._array.shape, dtype=self._dtype)
        np.copyto(_as_array(tensor), self._array)
        return tensor


def copy_to_host(tensor: Tensor) -> HostCopy:
    """Begin a copy of the tensor in host memory."""
    return PinnedCopy(tensor) if tensor.is_cuda else ArrayCopy(tensor)


@contextlib.contextmanager
def kept_on_host(x: Tensor) -> Iterator[None]:
    """What autograd saves of x inside is its copy on the host; all else is saved as ever.

    The copy begins at once, beside what runs inside, and has ended for all that runs after.
    """
    copy = copy_to_host(x)
    place = (x.data_ptr(), x.shape, x.dtype)

    def pack(saved: Tensor) -> Any:
        return copy if (saved.data_ptr(), saved.shape, saved.dtype) == place else saved

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.back()

    with saved_tensors_hooks(pack, unpack):
        yield
    copy.finish()


def _as_array(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor; numpy has no bfloat16."""
    return tensor.view(_WITHOUT_NUMPY.get(tensor.dtype, tensor.dtype)).numpy()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
