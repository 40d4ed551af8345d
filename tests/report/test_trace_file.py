"""Reading a trace: whatever is in it, sums of what is right and a warning for what is not."""

from __future__ import annotations

import codecs
import json
import re
import tracemalloc

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.report import records as records_module
from megatron_paradyse.report import trace_file
from megatron_paradyse.report.content import Content
from megatron_paradyse.report.page import facts
from megatron_paradyse.report.trace_file import read_trace, warning_lines
from megatron_paradyse.train import summary
from megatron_paradyse.units import MAX_SEQ_LENGTH
from tests.report.samples import RUN, STAGE, fitted, iteration, microbatch, records, write_trace

GOOD = microbatch(1)
CORRECTION = {
    "kind": "correction",
    "iteration": 1,
    "seconds_factors": {"megatron_ts": 2.0, "metp": 1.0},
    "bytes_factors": {"megatron_ts": 1.0, "metp": 1.0},
}
BROKEN = {
    "not JSON": "{'kind': 1}",
    "no object": "[1, 2]",
    "unknown kind": '{"kind": "weather", "wind": 3}',
    "no kind": "{}",
    "kind of no text": '{"kind": ["run"]}',
    "nested": "[" * 5000,
    "huge number": '{"kind": "iteration", "iteration": 1, "seconds": 1e999}',
    "long number": '{"kind": "iteration", "iteration": 1, "seconds": ' + "9" * 5000 + "}",
    "not a number": '{"kind": "iteration", "iteration": 1, "seconds": NaN}',
    "true as number": '{"kind": "iteration", "iteration": true, "seconds": 1}',
    "negative": '{"kind": "iteration", "iteration": 1, "seconds": -1}',
    "lacking": '{"kind": "microbatch", "iteration": 1}',
    "no plan": json.dumps({**GOOD, "plan": "nothing"}),
    "empty plan": json.dumps({**GOOD, "plan": ""}),
    "plan of many layers": json.dumps({**GOOD, "plan": "1-999999 metp"}),
    "layer twice": json.dumps({**GOOD, "plan": "1-2 metp, 2 metp"}),
    "control characters": json.dumps({**GOOD, "plan": "1 me\u001b[31mtp"}),
    "half a character": json.dumps({**GOOD, "plan": "1 me\ud800tp"}),
    "length 0": json.dumps({**GOOD, "seq_length": 0}),
    "run without stages": json.dumps({**RUN, "stages": 3}),
    "stage lacking": json.dumps({**RUN, "stages": [{}]}),
    "stage margin": json.dumps({**RUN, "stages": [{**STAGE, "margin": "x"}]}),
    "no flight": json.dumps({**RUN, "stages": [{**STAGE, "num_in_flight": 0}]}),
    "stage predicts": json.dumps({**RUN, "stages": [{**STAGE, "num_predicting": -1}]}),
    "stage input": json.dumps({**RUN, "stages": [{**STAGE, "input_bytes_per_token": -1}]}),
    "stage host": json.dumps({**RUN, "stages": [{**STAGE, "host_bytes": "x"}]}),
    "stage buffer": json.dumps({**RUN, "stages": [{**STAGE, "buffer_free_above": "x"}]}),
    "factors of no strategy": json.dumps({**CORRECTION, "seconds_factors": [1.0]}),
    "hopes of no strategy": json.dumps({**CORRECTION, "hopes": 1.0}),
    "bytes of no strategy": json.dumps({**CORRECTION, "bytes_factors": [1.0]}),
    "factor of no number": json.dumps({**CORRECTION, "seconds_factors": {"metp": "2"}}),
    "place of no number": json.dumps({**RUN, "place": {"data": 0, "pipeline": "x"}}),
    "place of no object": json.dumps({**RUN, "place": [0]}),
    "costs of no text": json.dumps({**RUN, "costs": {**RUN["costs"], "date": 3}}),
    "documents of no number": json.dumps({**GOOD, "documents": "x"}),
    "too long": json.dumps({**GOOD, "plan": "x" * 100_000}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_left_out_with_a_warning_that_names_it(name, tmp_path):
    path = write_trace(tmp_path / "t.jsonl", records(2))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], BROKEN[name], *lines[2:]]) + "\n")
    trace = read_trace(str(path))
    assert trace.summary.microbatches == trace.iterations.count == 2
    (warning,) = warning_lines(trace)
    assert warning.startswith("t.jsonl: line 3 left out: ") and len(warning) < 300


def test_estimates_follow_the_costs_as_training_corrected_them(tmp_path):
    costs = fitted(tmp_path)
    seconds = []
    for more in ([], [CORRECTION]):
        path = write_trace(tmp_path / "t.jsonl", [RUN, *more, *records(2, run=None)])
        trace = read_trace(str(path), costs)
        assert not trace.warnings
        seconds.append({one.name: one.seconds for one in trace.summary.fixed_estimates()})
    assert seconds[1]["megatron_ts"] == pytest.approx(2 * seconds[0]["megatron_ts"])
    assert seconds[1]["metp"] == pytest.approx(seconds[0]["metp"])


def test_estimates_hope_for_what_training_tried(tmp_path):
    costs = fitted(tmp_path)
    seconds = []
    for more in ({}, {"hopes": {"metp": 0.75}}):
        lines = [RUN, {**CORRECTION, **more}, *records(2, run=None)]
        path = write_trace(tmp_path / "t.jsonl", lines)
        trace = read_trace(str(path), costs)
        seconds.append({one.name: one.seconds for one in trace.summary.fixed_estimates()})
    assert seconds[1]["metp"] == pytest.approx(0.75 * seconds[0]["metp"])
    assert seconds[1]["megatron_ts"] == seconds[0]["megatron_ts"]


def test_a_run_of_one_strategy_saves_nothing_over_that_strategy(tmp_path):
    """Predictions are made with the factors of their time, and a restart begins without any."""
    costs = fitted(tmp_path)
    model, run, starts = costs.require_model(), {**RUN, "strategies": ["metp"]}, (1.0, 1.2, 1.5)
    lines, number = [], 0
    for _ in range(2):
        lines.append(run)
        for factor in starts:
            lines.append({**CORRECTION, "seconds_factors": {"metp": factor}})
            for s in (128, 1024, 4096):
                number += 1
                halves = (model.operation("metp", half, s) for half in ("attention", "mlp"))
                seconds = 4 * factor * sum(costs.time_seconds for costs in halves)
                more = {"predicted_seconds": seconds, "seconds": 1.5 * seconds}
                lines.append(microbatch(number, s, "1-4 metp", **more))
        lines = [line for line in lines if line.get("seconds_factors") != {"metp": 1.0}]
    trace = read_trace(str(write_trace(tmp_path / "t.jsonl", lines)), costs)
    content = Content([trace], costs)
    assert trace.warnings == {} and content.best_fixed.name == "metp"
    assert content.best_fixed.seconds == pytest.approx(content.predicted_seconds, rel=1e-9)
    curves = content.cumulative
    assert curves["metp"].seconds == pytest.approx(curves["predicted"].seconds, rel=1e-9)
    assert facts(content)[5].value.removeprefix("-") == "0.0%"


def test_a_strategy_that_a_restart_brought_is_not_estimated_for_the_whole_run(tmp_path):
    costs = fitted(tmp_path)
    fewer = {**RUN, "strategies": ["metp"]}
    lines = [fewer, microbatch(1, 128, "1-4 metp"), RUN, microbatch(2, 1024, "1-4 metp")]
    content = Content([read_trace(str(write_trace(tmp_path / "t.jsonl", lines)), costs)], costs)
    assert [one.name for one in content.fixed] == ["metp"]
    assert content.cumulative["metp"].lengths == (128, 1024)
    assert content.cumulative["megatron_ts"].lengths == ()


def test_bytes_that_training_corrected_count_for_what_fits(tmp_path):
    costs = fitted(tmp_path)
    correction = {**CORRECTION, "bytes_factors": {"megatron_ts": 8.0, "metp": 1.0}}
    for more, unfit in (([], 0), ([correction], 1)):
        lines = [RUN, *more, microbatch(1, 8192)]
        trace = read_trace(str(write_trace(tmp_path / "t.jsonl", lines)), costs)
        found = {one.name: one.num_unfit for one in trace.summary.fixed_estimates()}
        assert (found["megatron_ts"], found["metp"]) == (unfit, 0)


def test_a_microbatch_beyond_what_planners_count_fits_nowhere(tmp_path):
    """It ended the whole report."""
    costs = fitted(tmp_path)
    lines = [RUN, microbatch(1), microbatch(2, MAX_SEQ_LENGTH)]
    trace = read_trace(str(write_trace(tmp_path / "t.jsonl", lines)), costs)
    assert trace.summary.microbatches == 2
    estimates = trace.summary.fixed_estimates()
    assert [one.num_unfit for one in estimates] == [1] * len(RUN["strategies"])


def test_chunks_of_a_pipeline_stage_are_estimated_each_by_its_own_memory(tmp_path):
    """Interleaved: the last chunk alone has the loss head, and here too little memory."""
    first = {**STAGE, "has_head": False}
    last = {**STAGE, "has_embedding": False, "budget_bytes": STAGE["static_bytes"]}
    lines = [{**RUN, "stages": [first, last]}]
    lines += [microbatch(1, 1024, plan) for plan in ("1-2 metp", "3-4 metp")]
    trace = read_trace(str(write_trace(tmp_path / "t.jsonl", lines)), fitted(tmp_path))
    found = {one.name: one.num_unfit for one in trace.summary.fixed_estimates()}
    assert found["metp"] == 1


def test_errors_are_medians_over_the_microbatches_of_all_traces(tmp_path):
    """One stage was off by 50% in one microbatch, the other by 10% in four."""
    wrong = {"predicted_seconds": 0.15, "predicted_peak_bytes": 300_000_000}
    lines = {"a": [microbatch(1, **wrong)], "b": [microbatch(i) for i in range(1, 5)]}
    traces = [read_trace(str(write_trace(tmp_path / name, found))) for name, found in lines.items()]
    for order in (traces, traces[::-1]):
        numbers = Content(order, None).as_json()
        assert numbers["median_error_seconds"] == pytest.approx(0.1)
        assert numbers["median_error_peak_bytes"] == pytest.approx(0.05)


def test_the_unfinished_last_line_is_told_as_such(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", records(2))
    path.write_text(path.read_text() + json.dumps(GOOD)[:40])
    trace = read_trace(str(path))
    assert trace.summary.microbatches == 2
    assert "unfinished (still being written?)" in warning_lines(trace)[0]


def test_a_byte_order_mark_costs_no_line(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", records(2))
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    trace = read_trace(str(path))
    assert trace.summary.microbatches == 2 and not trace.warnings


def test_bytes_that_are_no_text_are_survived(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", records(2))
    path.write_bytes(b"\xff\xfe\x00\n" + path.read_bytes())
    assert read_trace(str(path)).summary.microbatches == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "it is empty"),
        ("\n\n", "it is empty"),
        ("hello\n", "not JSON, or cut off"),
        (json.dumps(RUN) + "\n", "its starts finished none"),  # as with --skip-train
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(content, why, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    said = re.escape(f"holds no microbatch and no iteration ({why}): give the file")
    with pytest.raises(UserError, match=said):
        read_trace(str(path))


@pytest.mark.parametrize(("path", "why"), [("/dev/zero", "not a regular"), ("/x/y", "not exist")])
def test_what_is_no_file_is_refused(path, why):
    with pytest.raises(UserError, match=why):
        read_trace(path)


def test_rows_are_thinned_and_sums_are_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file.Sample.__init__, "__defaults__", (16,))
    lines = [line for i in range(1, 101) for line in (microbatch(i), iteration(i))]
    trace = read_trace(str(write_trace(tmp_path / "t.jsonl", lines)))
    assert trace.microbatches.step == 8 and len(trace.microbatches.rows) <= 16
    assert [row.iteration for row in trace.microbatches.rows] == list(range(1, 101, 8))
    assert trace.summary.microbatches == 100 and trace.tokens == 100_000 and trace.num_again == 0
    assert trace.summary.seconds == pytest.approx(10.0)
    assert "one in 8 of 100 microbatches" in warning_lines(trace)[0]
    told = {16: [], 17: ["t.jsonl: figures show one in 2 of 17 microbatches; sums are of all"]}
    for count, warnings in told.items():
        trace = read_trace(str(write_trace(tmp_path / "t.jsonl", lines[: 2 * count])))
        assert warning_lines(trace) == warnings


def test_memory_stays_bounded_however_different_the_lines_are(tmp_path, monkeypatch):
    """Every line another plan, length and kind: three times the lines take no more memory."""
    monkeypatch.setattr(trace_file.Sample.__init__, "__defaults__", (16,))
    monkeypatch.setattr(trace_file, "MOST_PLANS", 8)
    monkeypatch.setattr(summary, "MOST_SHAPES", 8)

    def peak_bytes(count: int) -> int:
        records_module.plan_of.cache_clear()
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as file:
            for i in range(1, count + 1):
                plan = ", ".join(
                    f"{n} {('metp', 'a')[i >> (n - 1) & 1]}/metp" for n in range(1, 30)
                )
                file.write(json.dumps(microbatch(i, i, plan)) + "\n")
                file.write(json.dumps({"kind": f"kind {i}"}) + "\n")
        tracemalloc.start()
        trace = read_trace(str(path))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert trace.summary.microbatches == count
        assert len(trace.warnings) <= trace_file.MOST_WARNINGS + 1
        return peak

    assert peak_bytes(900) < 1.2 * peak_bytes(300)


def test_too_many_strategies_are_left_out_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "MOST_STRATEGIES", 5)
    lines = [microbatch(i, plan=f"1-4 strategy_{i}") for i in range(1, 10)]
    trace = read_trace(str(write_trace(tmp_path / "t.jsonl", lines)))
    assert trace.summary.microbatches == 5
    assert "4 lines left out" in warning_lines(trace)[0]


def test_budgets_follow_the_starts(tmp_path):
    """A start that goes on from a checkpoint runs again what came after it."""
    again = {**RUN, "memory_budget_bytes": 400}
    lines = [*records(3), again, again, *(microbatch(i) for i in (2, 3, 4))]
    trace = read_trace(str(write_trace(tmp_path / "t.jsonl", lines)))
    assert trace.budgets == [(1, 3, RUN["memory_budget_bytes"]), (0, 0, 400), (2, 4, 400)]
    assert len(trace.runs) == 3


def test_iterations_that_ran_again_are_told(tmp_path):
    """Killed after the fourth, and started twice from the checkpoint of the second."""
    lines = [*records(4), RUN, RUN, *(iteration(i) for i in (3, 4, 5)), RUN]
    lines += [iteration(i) for i in (3, 4, 5, 6)]
    content = Content([read_trace(str(write_trace(tmp_path / "t.jsonl", lines)))], None)
    numbers = content.as_json()
    assert numbers["iterations"] == 4 + 3 + 4 and numbers["iterations_again"] == 2 + 3
    assert facts(content)[0].note == "4 starts, 5 of them ran again"


def test_the_figure_of_memory_has_each_budget_over_the_iterations_of_its_start(tmp_path):
    from matplotlib.figure import Figure

    from megatron_paradyse.report.run_figures import draw_memory
    from megatron_paradyse.report.style import Look

    again = {**RUN, "memory_budget_bytes": RUN["memory_budget_bytes"] // 2}
    lines = [*records(5), again, *(microbatch(i) for i in (3, 4))]
    content = Content([read_trace(str(write_trace(tmp_path / "t.jsonl", lines)))], None)
    figure = Figure()
    draw_memory(figure, content, Look())
    (budgets,) = figure.axes[0].collections
    first, second = (segment.tolist() for segment in budgets.get_segments())
    assert [first[0][0], first[1][0]] == [0.5, 5.5] and [second[0][0], second[1][0]] == [2.5, 4.5]
    assert first[0][1] == first[1][1] == pytest.approx(2 * second[0][1], rel=1e-6)


def test_tokens_per_second_are_of_the_iterations_that_tell_their_tokens(tmp_path):
    """A start with sequences of fixed length, which tells none, and one with documents."""
    fixed = [iteration(i, seconds=9.0, tokens=None) for i in range(1, 4)]
    lines = [RUN, *fixed, RUN, *(iteration(i) for i in range(4, 6))]
    content = Content([read_trace(str(write_trace(tmp_path / "t.jsonl", lines)))], None)
    numbers = content.as_json()
    assert (numbers["iterations"], numbers["seconds"], numbers["tokens"]) == (5, 28.0, 2000)
    assert numbers["tokens_per_second"] == pytest.approx(2000 / 1.0)


def test_a_trace_from_before_the_hosts_memory_was_planned_is_read(tmp_path):
    newer = ("host_bytes", "input_bytes_per_token", "angle_bytes_per_position")
    earlier = {k: v for k, v in STAGE.items() if k not in newer}
    path = write_trace(tmp_path / "t.jsonl", [{**RUN, "stages": [earlier]}, *records(2)[1:]])
    (run,) = read_trace(path).runs
    assert (run.stages[0].host_bytes, run.stages[0].input_bytes_per_token) == (None, 0.0)
    assert run.stages[0].angle_bytes_per_position == run.stages[0].held_besides == 0
    assert run.stages[0].waiting_bytes == 0


def test_layers_are_shared_by_their_number_where_stages_differ_in_it(tmp_path):
    """Of 4 layers one ran metp: a quarter, in whichever traces the stages are."""
    plans = ("1-3 megatron_ts", "4 metp")
    chunks = [microbatch(1, plan=plan) for plan in plans]
    one = write_trace(tmp_path / "one.jsonl", [*chunks, iteration(1)])
    two = [write_trace(tmp_path / f"{i}.jsonl", [c, iteration(1)]) for i, c in enumerate(chunks)]
    for paths in ([one], two):
        content = Content([read_trace(str(path)) for path in paths], None)
        assert content.layer_shares == {"megatron_ts": 0.75, "metp": 0.25}
