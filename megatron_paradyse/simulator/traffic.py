"""Communication that moves nothing: its seconds come from a network's model, into a clock.

Strategies communicate through transport.py; Megatron calls torch.distributed, some of it by names
bound when its modules were loaded. All of these are replaced for a while. What is received is what
the buffers happened to hold; `fill` puts this rank's own values there, for kernels that are timed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_paradyse.doors import Door, opened
from megatron_paradyse.simulator.network import Network
from megatron_paradyse.strategies import transport


class Communications(Protocol):
    """What takes the seconds: clock.py's, or that of real kernels."""

    def begin(self, seconds: float, prepare: Callable[[], None] | None = None) -> Any: ...

    def wait(self, begun: Any) -> None: ...


class NoClock:
    """Of communication that takes no time."""

    def begin(self, seconds: float, prepare: Callable[[], None] | None = None) -> None:
        if prepare is not None:
            prepare()

    def wait(self, begun: None) -> None: ...


@dataclass(frozen=True)
class Place:
    """A rank of a group, as far as strategies ask; its communication must be replaced."""

    of_rank: int
    of_size: int

    def rank(self) -> int:
        return self.of_rank

    def size(self) -> int:
        return self.of_size


class _Work:
    def __init__(
        self,
        clock: Communications,
        seconds: float,
        prepare: Callable[[], None] | None = None,
    ):
        self._clock, self._begun = clock, clock.begin(seconds, prepare)

    def wait(self, *unused: Any) -> None:
        self._clock.wait(self._begun)


class Traffic:
    """Stands where communication is begun. A Place is in the network's group; others have links."""

    def __init__(
        self, network: Network, clock: Communications, fill: Callable[[Tensor, Tensor], None] | None
    ):
        self._network, self._clock, self._fill = network, clock, fill

    def _begin(
        self, name: str, sent_bytes: float, into: Tensor | list[Tensor], x: Tensor, group: Any
    ) -> _Work:
        prepare = None if self._fill is None else functools.partial(self._fill_all, into, x)
        return _Work(self._clock, self._network_of(group).seconds(name, sent_bytes), prepare)

    def _network_of(self, group: Any) -> Network:
        if self._network.links is None or isinstance(group, Place):
            return self._network
        return self._network.of_ranks(torch.distributed.get_process_group_ranks(group))

    def _fill_all(self, into: Tensor | list[Tensor], x: Tensor) -> None:
        assert self._fill is not None
        for part in into if isinstance(into, list) else [into]:
            self._fill(part, x)

    # As in strategies/transport.py.

    def all_gather(self, into: Tensor, x: Tensor, group: Any) -> list:
        return [self._begin("all_gather", into.nbytes - x.nbytes, into, x, group)]

    def reduce_scatter(self, into: Tensor, x: Tensor, group: Any) -> list:
        return [self._begin("reduce_scatter", x.nbytes - into.nbytes, into, x, group)]

    def all_to_all(
        self, into: Tensor, x: Tensor, group: Any, *, num_received=None, num_sent=None
    ) -> list:
        sent = x.nbytes * (group.size() - 1) // group.size()
        if num_sent is not None and num_received is not None:
            row = x[0].nbytes if len(x) else 0
            kept = num_sent[group.rank()]
            sent = row * max(sum(num_sent) - kept, sum(num_received) - kept)
        return [self._begin("all_to_all", sent, into, x, group)]

    def exchange(self, into: Tensor, x: Tensor, group: Any, *, to: int, source: int) -> list:
        size = max(x.nbytes, into.nbytes)
        return [self._begin("exchange", size, into, x, group)] if size else []

    def broadcast(self, x: Tensor, group: Any, *, owner: int) -> list:
        return [self._begin("broadcast", x.nbytes, x, x, group)]

    def reduce(self, x: Tensor, group: Any, *, owner: int) -> list:
        return [self._begin("reduce", x.nbytes, x, x, group)]

    # As in torch.distributed.

    def all_gather_into_tensor(self, output, tensor, group=None, async_op=False, **unused):
        if _size(group) == 1:
            return self._alone(output, tensor, async_op)
        (work,) = self.all_gather(output, tensor, group)
        return _done(work, async_op)

    def reduce_scatter_tensor(self, output, tensor, op=None, group=None, async_op=False, **unused):
        if _size(group) == 1:
            return self._alone(output, tensor, async_op)
        (work,) = self.reduce_scatter(output, tensor, group)
        return _done(work, async_op)

    def all_reduce(self, tensor, op=None, group=None, async_op=False):
        p = _size(group)
        if p == 1:
            return self._alone(tensor, tensor, async_op)
        sent = 2 * (p - 1) * tensor.nbytes / p
        return _done(self._begin("all_reduce", sent, tensor, tensor, group), async_op)

    def all_to_all_single(
        self,
        output,
        input,
        output_split_sizes=None,
        input_split_sizes=None,
        group=None,
        async_op=False,
    ):
        if _size(group) == 1:
            return self._alone(output, input, async_op)
        received, sent = (
            None if splits is None else [int(rows) for rows in splits]
            for splits in (output_split_sizes, input_split_sizes)
        )
        (work,) = self.all_to_all(output, input, group, num_received=received, num_sent=sent)
        return _done(work, async_op)

    def all_gather_list(self, tensor_list, tensor, group=None, async_op=False):
        if _size(group) == 1:
            return self._alone(tensor_list[0], tensor, async_op)
        sent = sum(x.nbytes for x in tensor_list) - tensor.nbytes
        return _done(self._begin("all_gather", sent, tensor_list, tensor, group), async_op)

    def reduce_scatter_list(self, output, input_list, op=None, group=None, async_op=False):
        if _size(group) == 1:
            return self._alone(output, input_list[0], async_op)
        sent = sum(x.nbytes for x in input_list) - output.nbytes
        return _done(self._begin("reduce_scatter", sent, output, input_list[0], group), async_op)

    def _alone(self, output: Tensor, tensor: Tensor, async_op: bool):
        if output is not tensor:
            output.copy_(tensor)
        return _Work(self._clock, 0.0) if async_op else None


def _size(group: Any) -> int:
    return torch.distributed.get_world_size(group) if not isinstance(group, Place) else group.size()


def _done(work: _Work, async_op: bool) -> _Work | None:
    if async_op:
        return work
    work.wait()
    return None


def fill_with_own(into: Tensor, x: Tensor) -> None:
    """Finite values of the right size: this rank's own, again and again; zeros if it sends none."""
    if not x.numel():
        into.zero_()
    elif into is not x:
        flat, source = into.reshape(-1), x.reshape(-1)
        for start in range(0, len(flat), len(source)):
            part = flat[start : start + len(source)]
            part.copy_(source[: len(part)])


def strategy_doors(traffic: Traffic) -> list[Door]:
    """All communication of strategies, and none of Megatron's."""
    names = ("all_gather", "reduce_scatter", "all_to_all", "exchange", "broadcast", "reduce")
    return [(transport, name, getattr(traffic, name)) for name in names]


@contextlib.contextmanager
def replaced(
    network: Network,
    clock: Communications,
    *,
    fill: Callable[[Tensor, Tensor], None] | None = None,
) -> Iterator[None]:
    """All communication of strategies and of Megatron's layers goes to the clock, until the end."""
    from megatron.core.tensor_parallel import layers, mappings, utils

    traffic = Traffic(network, clock, fill)
    doors = strategy_doors(traffic)
    names = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"
    for name in names:
        doors.append((torch.distributed, name, getattr(traffic, name)))
    doors += [
        (torch.distributed, "all_gather", traffic.all_gather_list),
        (torch.distributed, "reduce_scatter", traffic.reduce_scatter_list),
    ]
    for module in (layers, mappings, utils):
        doors.append((module, "dist_all_gather_func", traffic.all_gather_into_tensor))
    for module in (layers, mappings):
        doors.append((module, "dist_reduce_scatter_func", traffic.reduce_scatter_tensor))
    with opened(doors):
        yield
