"""Measured limits in words and numbers, and the search at the longest that there is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_paradyse.preview.longest import PARADYSE, Limit, Longest
from megatron_paradyse.preview.measured import (
    MeasuredLimit,
    Trial,
    measured_limits,
    of_file,
    search,
)
from megatron_paradyse.preview.measured_text import measured_report, measured_values
from megatron_paradyse.units import MAX_SEQ_LENGTH
from tests.preview.test_measured import ABOUT

LIMITS = [
    MeasuredLimit(PARADYSE, 3_000, 2_560, 2_624),
    MeasuredLimit("metp+recompute", 2_048, 2_048, 2_112),
    MeasuredLimit("metp", 900, 1_024, None, "longer ones would take too long"),
    MeasuredLimit("ulysses_z", 0, 0, 64),
]


def test_a_row_says_what_was_predicted_found_and_missed():
    table, _ = measured_report((ABOUT, LIMITS)).split("\n\n")
    rows = {line.split()[0]: line for line in table.splitlines()}
    cells = {name: row.split()[1:] for name, row in rows.items()}
    assert cells[PARADYSE] == ["3,000", "2,560", "2,624", "+17.2%"]
    assert cells["metp+recompute"] == ["2,048", "2,048", "2,112", "+0.0%"]
    assert "900" in rows["metp"] and "longer ones would take too long" in rows["metp"]
    assert cells["metp"][-1] == "-12.1%"
    assert cells["ulysses_z"] == ["none", "none", "64", "-"]


def test_paradyses_limit_is_told_over_the_best_of_each_kind():
    text = " ".join(measured_report((ABOUT, LIMITS)).split())
    assert "reaches 1.250 times as far as the best single strategy, metp+recompute." in text
    assert "reaches 2.500 times as far as the best one that does not recompute, metp." in text
    assert measured_values((ABOUT, LIMITS))["ratios"] == {
        "single strategy": 1.25,
        "one that does not recompute": 2.5,
    }


@pytest.mark.parametrize(
    "limits", [LIMITS[1:], LIMITS[:1], [LIMITS[0], LIMITS[3]], [LIMITS[3], LIMITS[1]]]
)
def test_without_both_limits_there_is_no_ratio(limits):
    assert "times as far" not in measured_report((ABOUT, limits))
    assert measured_values((ABOUT, limits))["ratios"] == {}


def test_what_fits_at_the_longest_there_is_is_that():
    most = MAX_SEQ_LENGTH // 192 * 192
    tried = []
    trials = SimpleNamespace(fits=lambda tokens: not tried.append(tokens), longest=lambda: most)
    found = search("metp", most // 3, trials, step=192, resolution=0.1)
    assert found == MeasuredLimit("metp", most // 3, most, None, "the longest there is")
    assert tried[-1] == most and len(tried) < 10 and all(tokens % 192 == 0 for tokens in tried)


@pytest.mark.parametrize("only", [None, ["metp"]])
def test_limits_are_read_from_trials_in_the_order_of_the_predictions(only):
    def limit(name: str, tokens: int) -> Limit:
        return Limit(name, tokens, 0, None)

    found = Longest(1, 64, limit(PARADYSE, 640), None, (limit("metp", 128), limit("metp2", 256)))
    trials = [
        Trial(name, tokens, "fits" if tokens <= most else "oom", "", "")
        for name, most in ((PARADYSE, 640), ("metp", 128), ("metp2", 256))
        for tokens in range(64, 1024, 64)
    ]
    limits = measured_limits(found, of_file(trials), resolution=0.02, only=only)
    expected = [(PARADYSE, 640), ("metp2", 256), ("metp", 128)]
    assert [(one.strategy, one.tokens) for one in limits] == [
        one for one in expected if only is None or one[0] in only
    ]
