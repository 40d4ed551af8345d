"""The seconds of every communication, by hand, and what one rank alone does."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from megatron_paradyse.doors import opened
from megatron_paradyse.simulator.measure_network import _communication
from megatron_paradyse.simulator.network import (
    COLLECTIVES,
    AlphaBeta,
    Network,
    find_network,
    free_network,
)
from megatron_paradyse.simulator.traffic import NoClock, Place, Traffic, strategy_doors

# Seconds are bytes times a number of the collective's own.
COSTS = {name: AlphaBeta(0.0, 1 / (10**i)) for i, name in enumerate(COLLECTIVES)}
GROUP = Place(1, 3)
SHARE, WHOLE = torch.zeros(4, 2), torch.zeros(12, 2)  # of 32 and 96 bytes
NOTHING = torch.zeros(0, 2)


class Record:
    """A clock that writes down what is begun and waited for."""

    def __init__(self):
        self.begun, self.waited = [], []

    def begin(self, seconds, prepare=None):
        self.begun.append(seconds)
        return len(self.begun) - 1

    def wait(self, begun):
        self.waited.append(begun)


def traffic(p: int = 3) -> tuple[Traffic, Record]:
    clock = Record()
    return Traffic(Network("round", p, "by hand", COSTS), clock, fill=None), clock


@pytest.mark.parametrize(
    ("name", "tensors", "more", "sent"),
    [
        ("all_gather", (WHOLE, SHARE), {}, 64),
        ("reduce_scatter", (SHARE, WHOLE), {}, 64),
        ("all_to_all", (WHOLE, WHOLE), {}, 64),
        # 5 rows to others and 7 from them, of 8 bytes; 4 it keeps
        ("all_to_all", (torch.zeros(11, 2), torch.zeros(9, 2)), ([2, 4, 5], [3, 4, 2]), 7 * 8),
        ("all_to_all", (torch.zeros(9, 2), torch.zeros(11, 2)), ([3, 4, 2], [2, 4, 5]), 7 * 8),
        ("exchange", (SHARE, WHOLE), {"to": 2, "source": 0}, 96),
        ("exchange", (WHOLE, NOTHING), {"to": 2, "source": 0}, 96),
        ("exchange", (NOTHING, NOTHING), {"to": 2, "source": 0}, None),
        ("broadcast", (SHARE,), {"owner": 0}, 32),
        ("reduce", (SHARE,), {"owner": 0}, 32),
    ],
)
def test_a_collective_takes_what_is_sent_by_its_own_rate(name, tensors, more, sent):
    if isinstance(more, tuple):
        more = dict(zip(("num_received", "num_sent"), more, strict=True))
    there, clock = traffic()
    works = getattr(there, name)(*tensors, GROUP, **more)
    expected = [] if sent is None else [sent * 10 ** COLLECTIVES.index(name)]
    assert clock.begun == pytest.approx(expected) and clock.waited == []
    for work in works:
        work.wait()
    assert clock.waited == list(range(len(expected)))


MEGATRONS = {
    "all_gather_into_tensor": ((WHOLE, SHARE), "all_gather", 64),
    "reduce_scatter_tensor": ((SHARE, WHOLE), "reduce_scatter", 64),
    "all_reduce": ((WHOLE,), "all_reduce", 128),
    "all_to_all_single": ((WHOLE, WHOLE), "all_to_all", 64),
    "all_gather_list": (([*WHOLE.split((4, 2, 6))], SHARE), "all_gather", 64),
    "reduce_scatter_list": ((SHARE, [*WHOLE.split((4, 2, 6))]), "reduce_scatter", 64),
}


@pytest.mark.parametrize("name", MEGATRONS)
def test_megatron_waits_at_once_unless_it_asks_for_the_work(name):
    tensors, collective, sent = MEGATRONS[name]
    there, clock = traffic()
    assert getattr(there, name)(*tensors, group=GROUP) is None
    assert clock.begun == pytest.approx([sent * 10 ** COLLECTIVES.index(collective)])
    assert clock.waited == [0]
    work = getattr(there, name)(*tensors, group=GROUP, async_op=True)
    assert clock.waited == [0]
    work.wait()
    assert clock.waited == [0, 1]


def test_what_experts_exchange_is_counted_by_its_rows():
    """Of tensors and arrays too, as Megatron gives them."""
    there, clock = traffic()
    x, into = torch.zeros(9, 2), torch.zeros(11, 2)
    splits = torch.tensor([2, 4, 5]), np.array([3, 4, 2])
    there.all_to_all_single(into, x, *splits, group=GROUP)
    assert clock.begun == pytest.approx([7 * 8 * 10 ** COLLECTIVES.index("all_to_all")])


@pytest.mark.parametrize("name", MEGATRONS)
def test_a_group_of_other_ranks_takes_what_its_links_do(name, monkeypatch):
    apart, ranks = types.SimpleNamespace(size=lambda: 3), [1, 9, 17]
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: ranks)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 3)
    tensors, collective, sent = MEGATRONS[name]
    near, clock = find_network("nvlink3", 3), Record()
    there = Traffic(near, clock, fill=None)
    for group in (GROUP, apart):
        getattr(there, name)(*tensors, group=group)
    assert clock.begun == [n.seconds(collective, sent) for n in (near, near.of_ranks(ranks))]


@pytest.mark.parametrize("name", MEGATRONS)
def test_a_rank_alone_has_its_own_values_and_takes_no_time(name):
    """Of a group beside the network's: data parallelism's of one replica."""
    there, clock = traffic()
    own = torch.arange(4.0)
    into = own if name == "all_reduce" else torch.empty(4)
    tensors = (own,) if name == "all_reduce" else (into, own)
    if name.endswith("_list"):
        tensors = ([into], own) if name == "all_gather_list" else (into, [own])
    assert getattr(there, name)(*tensors, group=Place(0, 1)) is None
    assert into.tolist() == own.tolist() and clock.begun == []
    getattr(there, name)(*tensors, group=Place(0, 1), async_op=True).wait()
    assert clock.begun == [0.0] and clock.waited == [0]


def test_what_is_received_is_filled_when_the_clock_says():
    filled = []
    there = Traffic(free_network(3), NoClock(), fill=lambda into, x: filled.append((into, x)))
    there.all_gather(WHOLE, SHARE, GROUP)
    ((into, x),) = filled
    assert into is WHOLE and x is SHARE
    parts = WHOLE.split((4, 2, 6))
    there.all_gather_list([*parts], SHARE, GROUP)
    places = [part.data_ptr() for part in parts]
    assert [into.data_ptr() for into, _ in filled[1:]] == places


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_measured_by_the_bytes_that_it_is_priced_by(name):
    """So that bytes / B are the measured seconds."""
    there, clock = traffic()
    doors = [*strategy_doors(there), (torch.distributed, "all_reduce", there.all_reduce)]
    with opened(doors):
        begin, sent = _communication(name, torch.ones(96, dtype=torch.uint8), GROUP)
        begin()
    assert clock.begun == pytest.approx([sent * 10 ** COLLECTIVES.index(name)])
