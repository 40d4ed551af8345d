"""Copies of tensors in host memory: where what +offload keeps waits for its backward.

On a GPU the copy is pinned, from PyTorch's own pool of pinned memory, which hands a piece out again
when the copies that use it have ended, and which rounds each piece up to a power of two: so a copy
is several pieces that are one, down to SMALLEST_PIECE. On a CPU it is a numpy array: host and
device are one memory there, and only the count of live bytes (live_bytes.py) tells them apart.
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

SMALLEST_PIECE = 1 << 20  # bytes: of each copy, fewer than these are lost

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
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._source: Tensor | None = tensor.detach().reshape(-1)  # itself, or made contiguous
        sizes = piece_sizes(len(self._source), max(1, SMALLEST_PIECE // tensor.itemsize))
        self._pinned = [torch.empty(size, dtype=tensor.dtype, pin_memory=True) for size in sizes]
        stream.wait_stream(torch.cuda.current_stream(tensor.device))  # the tensor is made there
        with torch.cuda.stream(stream):
            for piece, part in zip(self._pinned, self._source.split(sizes), strict=True):
                piece.copy_(part, non_blocking=True)
        self._done = stream.record_event()

    def finish(self) -> None:
        self._source = None
        # The stream waits, not the host. What is freed from here on is reused after the copy, so
        # that the caching allocator need not be told of the other stream (record_stream), and the
        # bytes are free at once.
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def back(self) -> Tensor:
        # On the stream of the kernels, which need it next.
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        parts = tensor.view(-1).split([len(piece) for piece in self._pinned])
        for part, piece in zip(parts, self._pinned, strict=True):
            part.copy_(piece, non_blocking=True)
        return tensor


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


def piece_sizes(length: int, smallest: int) -> list[int]:
    """Powers of two whose sum is the length, the largest first; the last piece is what is left once
    that is less than `smallest`, a power of two."""
    sizes = []
    while length >= smallest:
        sizes.append(1 << (length.bit_length() - 1))
        length -= sizes[-1]
    return [*sizes, length] if length else sizes


def copy_to_host(tensor: Tensor) -> HostCopy:
    """Begin a copy of the tensor in host memory."""
    return PinnedCopy(tensor) if tensor.is_cuda else ArrayCopy(tensor)


@contextlib.contextmanager
def kept_on_host(x: Tensor) -> Iterator[None]:
    """What autograd saves of x inside is its copy on the host; all else is saved as ever.

    The copy begins at once, beside what runs inside, and has ended for all that runs after. As
    ever, RuntimeError in the backward where something saved has been changed in place.
    """
    copy = copy_to_host(x)
    place = _place(x)

    def pack(saved: Tensor) -> Any:
        if _place(saved) == place:
            return copy
        return saved, saved._version  # which autograd compares only where nothing is packed

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, tuple):
            return packed.back()
        saved, version = packed
        if saved._version != version:
            raise RuntimeError(
                f"a tensor of shape {[*saved.shape]} that the backward needs was changed in place: "
                f"its version is {saved._version}, {version} was saved"
            )
        return saved

    with saved_tensors_hooks(pack, unpack):
        yield
    copy.finish()


def _place(x: Tensor) -> tuple[Any, ...]:
    """Alike of tensors that are one; strides tell a square one from its transpose."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """What the host computed, as a tensor of its own on the device.

    Of a GPU without waiting: what is queued there goes on, and so does the host.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cuda" and type(tensor) is Tensor:  # a fake one has no memory
        tensor = tensor.pin_memory()  # kept by PyTorch's pool until the copy has ended
    return tensor.to(device, non_blocking=True, copy=True)


def _as_array(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor; numpy has no bfloat16."""
    return tensor.view(_WITHOUT_NUMPY.get(tensor.dtype, tensor.dtype)).numpy()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
