"""A transport that copies through host memory: ranks that share one GPU communicate over gloo.

NCCL refuses two ranks on one device, and gloo moves CUDA tensors only for some collectives. The
staging transport is stricter than the true one: what is received is NaN until it is waited for, and
waiting fails if what was sent has changed or is gone by then, because an asynchronous transport may
read it up to that moment.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_paradyse.strategies import transport

PLAIN = {
    name: getattr(transport, name)
    for name in ("all_gather", "reduce_scatter", "all_to_all", "exchange", "broadcast", "reduce")
}


class _Staged:
    """Communication of host buffers: waits for it, checks what was sent, delivers the result."""

    def __init__(self, works, *, host: Tensor, sent: Tensor | None = None):
        self._works, self._host = works, host
        self._sent = None if sent is None else weakref.ref(sent)
        self._delivery: tuple[Tensor, Tensor] | None = None

    def deliver(self, host: Tensor, into: Tensor) -> _Staged:
        """On wait(), copy host to `into`, which is unreadable until then."""
        self._delivery = into, host
        into.fill_(float("nan"))
        return self

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._sent is not None:
            sent = self._sent()
            assert sent is not None, "a buffer was dropped while it was being sent"
            same = torch.equal(_bytes(sent.detach().cpu()), _bytes(self._host))
            assert same, "a buffer changed while it was being sent"
        if self._delivery is not None:
            into, host = self._delivery
            into.copy_(host)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _to_host(x: Tensor) -> Tensor:
    assert x.is_contiguous(), "transports take contiguous buffers"
    return x.detach().to("cpu", copy=True)


class Staging:
    """The functions of transport.py; `calls` are those so far, to compare between ranks.

    A communicator runs what it is given in order: ranks that call in different orders would wait
    for each other for ever.
    """

    def __init__(self):
        self.calls: list[tuple[Any, ...]] = []

    def all_gather(self, into, x, group):
        return self._move("all_gather", into, x, group)

    def reduce_scatter(self, into, x, group):
        return self._move("reduce_scatter", into, x, group)

    def all_to_all(self, into, x, group, **rows):
        return self._move("all_to_all", into, x, group, **rows)

    def exchange(self, into, x, group, **peers):
        return self._move("exchange", into, x, group, **peers)

    def _move(self, name, into, x, group, **options):
        uneven = "num_sent" in options  # ranks send and receive different numbers of rows
        self.calls.append((name, x.dtype, None if uneven else tuple(x.shape)))
        host, received = _to_host(x), torch.empty_like(_to_host(into))
        works = PLAIN[name](received, host, group, **options)
        return [_Staged(works, host=host, sent=x).deliver(received, into)]

    def broadcast(self, x, group, *, owner):
        self.calls.append(("broadcast", x.dtype, tuple(x.shape), owner))
        mine, host = owner == group.rank(), _to_host(x)
        works = PLAIN["broadcast"](host, group, owner=owner)
        if mine:
            return [_Staged(works, host=host, sent=x)]
        return [_Staged(works, host=host).deliver(host, x)]

    def reduce(self, x, group, *, owner):
        self.calls.append(("reduce", x.dtype, tuple(x.shape), owner))
        host = _to_host(x)
        works = PLAIN["reduce"](host, group, owner=owner)
        if owner == group.rank():
            return [_Staged(works, host=host).deliver(host, x)]
        x.fill_(float("nan"))
        return [_Staged(works, host=host)]


@contextmanager
def staged() -> Iterator[Staging]:
    """Stage all communication of strategies inside."""
    staging = Staging()
    with patch.multiple(transport, **{name: getattr(staging, name) for name in PLAIN}):
        yield staging
