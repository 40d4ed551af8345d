"""Outputs that nobody reads: what runs again in a backward is asked for its graph alone.

A linear at the end of such a run computes nothing then: its backward takes its input and weight.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from torch import Tensor

_here = threading.local()  # a backward may run in a thread of autograd's


@contextlib.contextmanager
def output_unused() -> Iterator[None]:
    """The values of what an MLP inside returns are not read."""
    before = is_output_unused()
    _here.unused = True
    try:
        yield
    finally:
        _here.unused = before


def is_output_unused() -> bool:
    return getattr(_here, "unused", False)


def without_values(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Of that shape and the dtype of `like`, in no memory."""
    return like.new_empty(()).expand(*shape)
