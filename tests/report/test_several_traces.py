"""Traces of several replicas, stages or starts: added up, counted once, or warned of."""

from __future__ import annotations

import itertools
import re

import pytest

from megatron_paradyse.report.content import Content
from megatron_paradyse.report.figures import KINDS
from megatron_paradyse.report.trace_file import read_trace
from tests.report.samples import (
    RUN,
    iteration,
    microbatch,
    records,
    write_trace,
)


def test_several_grids_are_added_and_iterations_counted_once(tmp_path):
    paths = [write_trace(tmp_path / f"t-dp{i}-pp0.jsonl", records(4)) for i in range(2)]
    numbers = Content([read_trace(str(path)) for path in paths], None).as_json()
    assert numbers["iterations"] == 4 and numbers["tokens"] == 4000
    assert numbers["microbatches"] == 8
    assert sum(numbers["layer_shares"].values()) == pytest.approx(1)


def test_time_by_length_and_changes_of_plan_are_of_all_grids(tmp_path):
    """Each grid has lengths that lie between those of the other."""
    of_grids = (((1024, 1.0), (4096, 4.0)), ((2048, 2.0), (4096, 8.0), (8192, 16.0)))
    traces = []
    for i, grid in enumerate(of_grids):
        lines = [
            microbatch(number, length, seconds=seconds, switched=number > 1)
            for number, (length, seconds) in enumerate(grid, 1)
        ]
        traces.append(read_trace(str(write_trace(tmp_path / f"t-dp{i}-pp0.jsonl", lines))))
    content = Content(traces, None)
    measured = content.cumulative["measured"]
    assert measured.lengths == (1024, 2048, 4096, 8192)
    assert measured.seconds == (1.0, 3.0, 15.0, 31.0)
    assert content.as_json()["changes_of_plan"] == 1 + 2


def test_traces_of_two_trainings_are_warned_of(tmp_path):
    run = {**RUN, "place": {"data": 0, "pipeline": 0}}
    lines = [run, *records(2)[1:]]
    first, second = (write_trace(tmp_path / f"{name}.jsonl", lines) for name in ("a", "b"))
    found = Content([read_trace(str(path)) for path in (first, second)], None).warnings()
    assert found == [
        f"{second} is of the same replica and pipeline stage as {first}: another training or "
        "start, and iterations are those of one of them"
    ]
    assert not Content([read_trace(str(first))], None).warnings()


OTHER_STARTS = {
    "holds records of 2 replicas or pipeline stages, each": {"place": {"data": 1, "pipeline": 0}},
    "holds a start twice, and counts it twice": {"date": RUN["date"]},
    r"of several models \(4 layers of 256, 8 layers of 256\), and": {
        "model": {"num_layers": 8, "hidden_size": 256}
    },
}


@pytest.mark.parametrize("said", OTHER_STARTS)
def test_traces_that_were_joined_to_one_file_are_warned_of(said, tmp_path):
    """A restart of the same training adds to its file too."""
    run = {**RUN, "place": {"data": 0, "pipeline": 0}}
    again = {**run, "date": "2026-11-21T12:30:00+00:00"}
    lines = [run, *records(2, run=None), again, *records(2, run=None)]
    assert not Content([read_trace(str(write_trace(tmp_path / "t.jsonl", lines)))], None).warnings()
    lines += [{**again, "date": "2026-11-22T12:00:00+00:00", **OTHER_STARTS[said]}]
    (found,) = Content([read_trace(str(write_trace(tmp_path / "j.jsonl", lines)))], None).warnings()
    assert re.search(f"j.jsonl.* {said}", found)


@pytest.mark.parametrize("told", [True, False])
def test_a_sequence_is_counted_once_for_all_stages_and_chunks(told, tmp_path):
    """Two replicas of two pipeline stages with two chunks each; earlier traces are told by name."""
    traces = []
    for replica, stage in itertools.product(range(2), range(2)):
        chunks = [f"{stage + 1} metp", f"{stage + 3} metp"]
        lines: list[dict] = [
            {**RUN, "place": {"data": replica, "pipeline": stage}} if told else RUN
        ]
        for i in range(1, 4):
            lines += [microbatch(i, 1024, plan, microbatch=m) for plan in chunks for m in range(2)]
            lines.append(iteration(i))
        name = f"{replica}{stage}.jsonl" if told else f"t-dp{replica}-pp{stage}.jsonl"
        traces.append(read_trace(str(write_trace(tmp_path / name, lines))))
    content = Content(traces, None)
    assert content.lengths.total() == 2 * 3 * 2
    assert Content([*traces, traces[0]], None).lengths.total() == 3 * 3 * 2  # a later file of one
    kinds = {kind.name: kind for kind in KINDS}
    assert kinds["lengths"].words(content).startswith("12 sequences, ")


def test_costs_of_another_file_than_the_runs_are_warned_of(tmp_path, costs):
    own = {**RUN, "costs": {**RUN["costs"], "fingerprint": costs.fingerprint}}
    for run, warned in ((RUN, 1), (own, 0), ({**RUN, "costs": None}, 0)):
        trace = write_trace(tmp_path / "t.jsonl", records(4, run=run))
        content = Content([read_trace(str(trace), costs)], costs)
        assert len(content.warnings()) == warned


def test_costs_of_another_file_than_one_of_the_starts_are_warned_of(tmp_path, costs):
    """Profiled again and started again, as training advises where costs have drifted."""
    own = {**RUN, "costs": {**RUN["costs"], "fingerprint": costs.fingerprint}}
    without = {**RUN, "costs": None}
    for runs, warned in (((RUN, own), 1), ((own, RUN), 1), ((own, own), 0), ((without, own), 0)):
        lines = [record for run in runs for record in records(4, run=run)]
        content = Content([read_trace(str(write_trace(tmp_path / "t.jsonl", lines)), costs)], costs)
        told = [
            warning for warning in content.warnings() if "cost file that some starts" in warning
        ]
        assert len(told) == warned


def test_a_later_start_without_costs_leaves_the_estimates_to_the_one_that_chose(tmp_path, costs):
    """What the later one ran fits within the memory of the stage that was planned, as before."""
    tight = {**RUN, "stages": [{**RUN["stages"][0], "budget_bytes": 210_000_000}]}
    fixed = {**RUN, "policy": "fixed:metp", "strategies": None, "costs": None, "stages": []}
    unplanned = {"predicted_seconds": None, "predicted_peak_bytes": None}
    later = [fixed, *({**line, **unplanned} for line in records(8, run=None))]
    once, twice = (
        read_trace(str(write_trace(tmp_path / f"{i}.jsonl", records(8, run=tight) + more)), costs)
        for i, more in enumerate(([], later))
    )
    assert once.summary.fixed_estimates() == twice.summary.fixed_estimates()
    assert len(twice.runs) == 2
    unfit = [
        {shape: {n: a.num_unfit for n, a in sums.alone.items()} for shape, sums in t.summary.shapes}
        for t in (once, twice)
    ]
    assert any(count for of_shape in unfit[0].values() for count in of_shape.values())
    assert unfit[1] == {s: {n: 2 * k for n, k in of.items()} for s, of in unfit[0].items()}
