"""The second run of what recomputes, in the backward: it is asked for its graph alone.

Nobody reads the output of an MLP then, so a linear at its end computes nothing: its backward takes
its input and weight. And memory matters most then: of a long sequence METP's attention takes one
key head at a time in the backward.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.autograd import Function

_here = threading.local()  # a backward may run in a thread of autograd's


@contextlib.contextmanager
def second_run(*, read: bool = False) -> Iterator[None]:
    """What runs inside ran before; the values of what an MLP returns are not read.

    read: they are, as in a first run.
    """
    before = is_second_run()
    _here.inside = not read
    try:
        yield
    finally:
        _here.inside = before


def is_second_run() -> bool:
    return getattr(_here, "inside", False)


def without_values(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Of that shape and the dtype of `like`, in no memory."""
    return like.new_empty(()).expand(*shape)


def has_values(x: Tensor) -> bool:
    """False of what without_values made."""
    return any(x.stride())


def with_values_of(x: Tensor, like: Tensor) -> Tensor:
    """x, whose values are not read, in the memory of `like`: dense, and no bytes of its own."""
    return _WithValuesOf.apply(x, like)


class _WithValuesOf(Function):
    @staticmethod
    def forward(ctx, x, like):
        return like.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad, None
