"""What is observed of microbatches as their forwards and backwards begin and end."""

from __future__ import annotations

import torch

from megatron_paradyse.hook import Planned
from megatron_paradyse.plan import uniform_plan
from megatron_paradyse.train.telemetry import Telemetry


class Meter:
    """Of which everything that is alive grows by 1,000 bytes a microbatch."""

    def __init__(self):
        self.peak_bytes = 0

    def reset_peak(self) -> None:
        self.peak_bytes += 1000


def planned(name: str, layers: tuple[int, ...] = (1, 2)) -> Planned:
    return Planned(0, 0, 1, 4, uniform_plan(layers, name), 0.0)


def test_a_change_of_plan_is_one_of_the_same_layers():
    """Chunks of an interleaved pipeline take turns, each with plans of its own."""
    telemetry, hidden = Telemetry(), torch.ones(4, 1, 2)
    runs = [("metp", (1, 2)), ("metp", (3, 4)), ("metp", (1, 2)), ("ulysses_z", (1, 2))]
    for name, layers in [*runs, ("metp", (3, 4)), ("metp", (1, 2))]:
        telemetry.begins(planned(name, layers), hidden)
    switched = [microbatch.switched for microbatch in telemetry.take()]
    assert switched == [False, False, False, True, False, True]
    telemetry.begins(planned("metp"), hidden)
    assert [microbatch.switched for microbatch in telemetry.take()] == [False]


def test_each_microbatch_has_a_peak_and_seconds_of_its_own():
    telemetry = Telemetry(Meter())
    for _ in range(2):
        hidden = torch.ones(4, 1, 2, requires_grad=True)
        telemetry.begins(planned("metp"), hidden)
        output = hidden * 2
        telemetry.forward_ends(output)
        assert telemetry.current.seconds is None
        output.sum().backward()
    first, second = telemetry.take()
    assert (first.peak_bytes, second.peak_bytes) == (1000, 2000)
    assert len(first.marks) == 4 and first.marks == sorted(first.marks)
    first.marks = [0.0, 1.0, 5.0, 5.5]  # others ran between its forward and its backward
    assert first.seconds == 1.5
    assert telemetry.current is None


def test_a_forward_that_nothing_follows_has_no_seconds():
    telemetry = Telemetry()
    telemetry.begins(planned("metp"), torch.ones(4, 1, 2))
    telemetry.forward_ends(torch.ones(4, 1, 2))
    (microbatch,) = telemetry.take()
    assert (microbatch.seconds, microbatch.peak_bytes) == (None, None)
