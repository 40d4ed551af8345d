"""Traces of packed rows: what is told of their load is estimated, and broken loads are left out."""

from __future__ import annotations

import dataclasses

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_paradyse.cli import cli
from megatron_paradyse.packing.load import load_of
from megatron_paradyse.packing.placement import place
from megatron_paradyse.report.content import Content
from megatron_paradyse.report.estimates import prices_rows_of
from megatron_paradyse.report.figures import KINDS
from megatron_paradyse.report.page import facts
from megatron_paradyse.report.trace_file import read_trace, warning_lines
from tests.report.samples import RUN, fitted, iteration, microbatch, write_trace

PACKED = {"documents": 64, "tokens": 8000}


LOAD = load_of(place([125] * 64, 4, causal=True, alignment=64), causal=True)


PRICED = {**PACKED, "load": dataclasses.asdict(LOAD)}


def test_rows_whose_load_is_told_are_estimated_as_such(tmp_path):
    """Their many short documents take less than one of as many tokens."""
    costs = fitted(tmp_path)
    seconds = {}
    for name, more in {"row": PRICED, "single": {}}.items():
        lines = [RUN, microbatch(1, 8192, **more), iteration(1)]
        trace = read_trace(str(write_trace(tmp_path / name, lines)), costs)
        content = Content([trace], costs)
        assert trace.warnings == {} and content.num_packed == 0
        seconds[name] = {one.name: one.seconds for one in content.fixed if not one.num_unfit}
    assert seconds["row"].keys() >= {"megatron_ts", "metp"}
    assert all(seconds["row"][name] < seconds["single"][name] for name in ("ulysses_z", "metp"))


@pytest.fixture(scope="module")
def costs_of_all(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("costs"))


@pytest.mark.parametrize(
    ("windows", "within", "prices"),
    [({}, None, True), ({"attention": 8}, None, False), ({"attention": 8}, LOAD, True)],
)
def test_rows_of_a_model_with_a_window_need_a_load_within_it(windows, within, prices, costs_of_all):
    """Without one they could not be counted, as with costs of another model than the trace's."""
    model = costs_of_all.require_model()
    packed = dataclasses.replace(model.packed, windows=windows)
    costs = dataclasses.replace(costs_of_all, model=model.with_rows(packed))
    assert prices_rows_of(costs, dataclasses.replace(LOAD, within=within)) == prices


BROKEN_LOADS = {
    "no object": 5,
    "lacking": {},
    "unknown": {**PRICED["load"], "more": 1},
    "no tokens": {**PRICED["load"], "seq_length": 0},
    "too many ranks": {**PRICED["load"], "p": 1 << 40},
    "text": {**PRICED["load"], "scores": "many"},
    "negative": {**PRICED["load"], "peers": -1},
    "two windows": {
        **PRICED["load"],
        "within": {**PRICED["load"], "within": PRICED["load"]},
    },
}


@pytest.mark.parametrize("name", BROKEN_LOADS)
def test_a_broken_load_leaves_its_line_out(name, costs_of_all, tmp_path):
    lines = [microbatch(1, 8192, **PACKED, load=BROKEN_LOADS[name]), microbatch(2, 8192, **PRICED)]
    trace = read_trace(str(write_trace(tmp_path / "t.jsonl", lines)), costs_of_all)
    assert trace.summary.microbatches == 1 and "line 1 left out: " in warning_lines(trace)[0]


NUMBERS = st.integers(0, 1 << 62)


LOADS = st.fixed_dictionaries(
    {name: NUMBERS for name in PRICED["load"]}
    | {"seq_length": st.integers(1, 1 << 30), "in_order": st.booleans(), "within": st.none()}
    | {"buffers": st.none()}
    | dict.fromkeys(("p", "groups"), st.integers(1, 1 << 14))
    | {"documents": st.integers(1, 1 << 62)}
)


@settings(max_examples=50, deadline=None)
@given(loads=st.lists(LOADS, min_size=1, max_size=3))
def test_no_load_breaks_the_estimates(loads, costs_of_all, tmp_path_factory):
    lines = [RUN, *(microbatch(1, 8192, **PACKED, load=load) for load in loads)]
    path = write_trace(tmp_path_factory.mktemp("loads") / "t.jsonl", lines)
    content = Content([read_trace(str(path), costs_of_all)], costs_of_all)
    assert content.as_json()["microbatches"] == len(loads)


def test_rows_without_a_load_are_neither_priced_nor_long_documents(tmp_path):
    """The row of 8,192 tokens would be priced as one document of them, and be the longest."""
    costs = fitted(tmp_path)
    packed = [microbatch(1, 8192, **PACKED), iteration(1)]
    single = [microbatch(2, 128), iteration(2)]
    content = Content([read_trace(str(write_trace(tmp_path / "t.jsonl", packed)), costs)], costs)
    numbers = content.as_json()
    assert numbers["estimates"] is None and numbers["packed_rows"] == 1
    assert numbers["longest_sequence_tokens"] == 990 and numbers["microbatches"] == 1
    assert numbers["median_error_seconds"] == pytest.approx(0.1)
    said = {fact.name: fact for fact in facts(content)}["estimated time saved"]
    assert said.value == "not known" and "1 packed rows" in said.note

    alone = read_trace(str(write_trace(tmp_path / "a.jsonl", single)), costs)
    both = read_trace(str(write_trace(tmp_path / "b.jsonl", [*packed, *single])), costs)
    assert both.summary.fixed_estimates() == alone.summary.fixed_estimates()
    assert "1 packed rows are not in the estimates" in warning_lines(both)[0]
    assert "without 1 packed rows" in facts(Content([both], costs))[5].note


def test_lengths_are_told_of_single_sequences_alone(tmp_path):
    """The longest document, of 990 tokens, is in a row, and so not one of those that are drawn."""
    lines = [microbatch(1, 8192, **PACKED), microbatch(1, 128), iteration(1)]
    content = Content([read_trace(str(write_trace(tmp_path / "t.jsonl", lines)))], None)
    (words,) = (kind.words for kind in KINDS if kind.name == "lengths")
    assert words(content) == (
        "1 sequence, the longest of 128 tokens, padding included. "
        "A trace has no lengths of the documents of packed rows."
    )
    assert content.as_json()["longest_sequence_tokens"] == 990


def test_a_page_of_packed_rows_alone_is_drawn(tmp_path):
    costs = fitted(tmp_path)
    lines = [RUN, *(microbatch(i, 8192, **PACKED) for i in range(1, 4)), iteration(3)]
    trace = write_trace(tmp_path / "t.jsonl", lines)
    arguments = [str(trace), "--costs", costs.path, "--output", str(tmp_path / "page.html")]
    result = CliRunner().invoke(cli, ["report", *arguments])
    assert result.exit_code == 0, result.output
    assert "not drawn: Lengths of the sequences: the trace holds packed rows only" in result.output
    said = "beside each strategy alone: they need the trace of a run planned by cost"
    assert said in " ".join(result.output.split())
