"""The facts and the table of a page are the trace's numbers, without its figures."""

from __future__ import annotations

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.planner.known import known_strategies
from megatron_paradyse.report.content import Content
from megatron_paradyse.report.estimates import cost_policies
from megatron_paradyse.report.page import facts, render
from megatron_paradyse.report.trace_file import read_trace, warning_lines
from megatron_paradyse.strategies import offloads
from tests.report.samples import PLANS, RUN, iteration, microbatch, records, write_trace
from tests.train.synthetic_costs import write_costs

CORRECTION = {
    "kind": "correction",
    "iteration": 1,
    "seconds_factors": {"metp": 1.5},
    "bytes_factors": {},
}


def content_of(folder, lines, costs=None) -> Content:
    return Content([read_trace(str(write_trace(folder / "t.jsonl", lines)), costs)], costs)


def told(content: Content) -> dict[str, tuple[str, str]]:
    return {fact.name: (fact.value, fact.note) for fact in facts(content)}


def test_facts_are_the_numbers_of_the_trace(tmp_path, costs):
    content = content_of(tmp_path, records(8), costs)
    best = content.as_json()["estimates"]["best_fixed_seconds"]
    found = told(content)
    value, note = found.pop("estimated time saved")
    assert value == f"{1 - 8 * 0.11 / best:.1%}"
    assert note.startswith("estimate by the cost model: 0.88 s of the layers where megatron_ts, ")
    assert found == {
        "iterations": ("8", ""),
        "tokens": ("8,000", ""),
        "tokens/s": ("2,000", "4 s of iterations"),
        "longest document": ("8,187 tokens", ""),
        "changes of plan": ("7", "of 8 microbatches"),
        "prediction error": ("10.0%", "median, of time; of peaks 5.0%"),
        "out of memory": ("0", "records, one of each rank"),
    }


def test_facts_say_what_the_trace_does_not_tell(tmp_path):
    plain = {"predicted_seconds": None, "predicted_peak_bytes": None}
    content = content_of(tmp_path, [microbatch(1, **plain)])
    assert content.as_json()["estimates"] is None
    found = told(content)
    assert found["tokens"] == ("not in the trace", "")
    assert found["prediction error"] == ("no predictions", "")
    assert found["estimated time saved"] == ("not known", "needs --costs")
    peak = {"predicted_peak_bytes": None}
    found = told(content_of(tmp_path, [microbatch(1, **peak)]))
    assert found["prediction error"] == ("10.0%", "median, of time")


def test_the_table_has_the_times_of_what_fits_and_the_numbers_of_what_does_not(tmp_path, costs):
    """The first length at which a strategy does not fit ends its curve."""
    tight = {**RUN, "stages": [{**RUN["stages"][0], "budget_bytes": 190_000_000}]}
    rows = [microbatch(i, s) for i, s in enumerate((128, 4096, 6144, 8192), 1)]
    content = content_of(tmp_path, [tight, *rows], costs)
    page = render(content, [], [])
    assert {bool(one.num_unfit) for one in content.fixed} == {True, False}
    for one in content.fixed:
        cells = (f"{one.seconds:.3g}", f"{one.seconds / (4 * 0.11):.2f}", "")
        if one.num_unfit:
            cells = ("", "", str(one.num_unfit))
        assert f"<td>{one.name}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) in page
    ends = {one.name: content.cumulative[one.name].oom_length for one in content.fixed}
    assert ends == {"megatron_ts": 6144, "ulysses_z": 4096, "metp": 4096, "metp+recompute": None}


def test_shares_are_sorted_over_all_traces_and_weighted_by_what_ran(tmp_path):
    grids = ([microbatch(1, plan=PLANS[0], seconds=1.0)], [])
    for number in (1, 2):
        grids[1].append(microbatch(number, plan="1-4 metp", seconds=3.0))
    traces = [
        read_trace(str(write_trace(tmp_path / f"t-dp{i}-pp0.jsonl", lines)))
        for i, lines in enumerate(grids)
    ]
    content = Content(traces, None)
    assert list(content.layer_shares.items()) == [
        ("metp", pytest.approx(2 / 3)),
        ("megatron_ts", pytest.approx(1 / 3)),
    ]
    assert list(content.time_shares.items()) == [
        ("metp", pytest.approx(6 / 7)),
        ("megatron_ts", pytest.approx(1 / 7)),
    ]


def test_the_last_correction_is_told(tmp_path):
    lines = [RUN, CORRECTION, microbatch(1), iteration(1)]
    assert content_of(tmp_path, lines).as_json()["costs_corrected_by"] == {"metp": 1.5}
    assert content_of(tmp_path, [*lines, RUN]).as_json()["costs_corrected_by"] is None


def test_a_kind_of_fault_that_was_told_is_counted_beside_many_others(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_paradyse.report.trace_file.MOST_WARNINGS", 2)
    unknown = [{"kind": kind} for kind in ("a", "b", "c", "d", "a")]
    (trace,) = content_of(tmp_path, [microbatch(1), *unknown]).traces
    assert warning_lines(trace) == [
        "t.jsonl: 2 lines left out, the first is line 2: unknown kind 'a'",
        "t.jsonl: line 3 left out: unknown kind 'b'",
        "t.jsonl: 2 lines left out, the first is line 4: other faults",
    ]


def test_shapes_beyond_the_most_are_left_out_of_the_estimates_and_told(tmp_path, monkeypatch):
    for module in ("report.trace_file", "train.summary"):
        monkeypatch.setattr(f"megatron_paradyse.{module}.MOST_SHAPES", 2)
    (trace,) = content_of(tmp_path, [microbatch(i, 64 * i) for i in range(1, 6)]).traces
    assert warning_lines(trace) == [
        "t.jsonl: estimates are of the first 2 shapes: 3 microbatches of others are left out"
    ]


def test_a_chunk_of_a_deeper_model_than_the_costs_is_estimated_as_that_models(tmp_path, costs):
    """The second has the head, and no room."""
    first = {**RUN["stages"][0], "has_head": False}
    second = {**RUN["stages"][0], "has_embedding": False, "budget_bytes": 100_000_001}
    run = {**RUN, "stages": [first, second], "model": {"num_layers": 8, "hidden_size": 256}}
    for plan, fits in (("1-4 metp", True), ("5-8 metp", False)):
        content = content_of(tmp_path, [run, microbatch(1, plan=plan)], costs)
        assert {not one.num_unfit for one in content.fixed} == {fits}


def test_without_a_start_in_the_trace_no_estimate_is_of_offload(tmp_path):
    costs = read_cost_file(
        str(write_costs(tmp_path / "costs.json", kind="cuda", host_bytes_per_second=1e9))
    )
    assert any(map(offloads, known_strategies(costs.require_model())))
    ((_, policy),) = cost_policies(costs, None, None)
    assert set(policy.strategies) == {"megatron_ts", "ulysses_z", "metp", "metp+recompute"}
