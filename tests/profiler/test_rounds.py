"""Points of one length, timed in rounds."""

from __future__ import annotations

from megatron_paradyse.costs.table import ATTENTION, MLP, OOM, Measurement
from megatron_paradyse.profiler.points import Point
from megatron_paradyse.profiler.rounds import SHORT_SECONDS, Rounds

POINTS = [Point(name, MLP, 64, 1) for name in ("megatron_ts", "metp")]


def measured(point: Point, forward: float, backward: float = 0.02) -> Measurement:
    return Measurement(*point.key, forward_seconds=forward, backward_seconds=backward)


def test_medians_of_three_rounds_in_turn():
    """While the first strategy was measured first, something else ran."""
    asked = []
    later = {"megatron_ts": iter([(0.01, 0.01), (0.011, 0.5)]), "metp": iter([(0.02, 0.02)] * 2)}

    def seconds(point):
        asked.append(point.strategy)
        return next(later[point.strategy])

    rounds = Rounds(seconds)
    rounds.add(POINTS[0], measured(POINTS[0], 0.024, 0.024))
    rounds.add(POINTS[1], measured(POINTS[1], 0.02, 0.02))
    found = rounds.again()
    assert asked == ["megatron_ts", "metp"] * 2
    assert (found[0].forward_seconds, found[0].backward_seconds) == (0.011, 0.024)
    assert (found[1].forward_seconds, found[1].backward_seconds) == (0.02, 0.02)


def test_long_and_failed_points_are_not_timed_again():
    rounds = Rounds(lambda point: (_ for _ in ()).throw(AssertionError))
    rounds.add(POINTS[0], measured(POINTS[0], SHORT_SECONDS))
    rounds.add(POINTS[1], Measurement(*POINTS[1].key, status=OOM))
    assert rounds.again() == []


def test_another_length_or_batch_begins_anew():
    rounds = Rounds(lambda point: (0.1, 0.1))
    assert not rounds.begins(POINTS[0])
    rounds.add(POINTS[0], measured(POINTS[0], 0.1))
    assert not rounds.begins(POINTS[1])
    assert rounds.begins(Point("metp", ATTENTION, 128, 1))
    assert rounds.begins(Point("metp", ATTENTION, 64, 2))
    rounds.again()
    assert not rounds.begins(Point("metp", ATTENTION, 128, 1))
