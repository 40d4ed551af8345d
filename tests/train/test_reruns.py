"""What Megatron's rerun state machine is told: spikes of the loss; iterations that run again."""

from __future__ import annotations

import argparse
import functools
import json

import pytest
import torch

from megatron_paradyse.report.trace_file import read_trace
from megatron_paradyse.train import plugin
from tests.train.harness import attempt, data_flags


@pytest.fixture(autouse=True)
def installed():
    plugin.install()


@pytest.mark.parametrize("checks", [False, True])
def test_a_spiky_loss_is_told_to_megatron_where_it_asks(checks, monkeypatch):
    from megatron_paradyse.train import gpt

    told = []
    state = argparse.Namespace(
        validate_result=lambda **of: told.append((of["message"], of["fatal"])),
        is_unexpectedly_large=lambda loss, **of: False,
    )
    args = argparse.Namespace(check_for_spiky_loss=checks, check_for_nan_in_loss_and_grad=False)
    monkeypatch.setattr(gpt, "get_args", lambda: args)
    monkeypatch.setattr(gpt, "get_rerun_state_machine", lambda: state)
    gpt.loss_function(torch.ones(1, 2), torch.ones(1, 2))
    assert told == ([("Spiky loss", False)] if checks else [])


def test_a_long_document_is_no_spike(monkeypatch):
    from megatron.core.rerun_state_machine import RerunStateMachine

    from megatron_paradyse.train import gpt

    state = argparse.Namespace(large_value_counts={}, max_values={}, spikes=[])
    state.is_unexpectedly_large = functools.partial(RerunStateMachine.is_unexpectedly_large, state)
    state.validate_result = lambda result, rejection_func, **of: state.spikes.append(
        rejection_func(result)
    )
    args = argparse.Namespace(check_for_spiky_loss=True, check_for_nan_in_loss_and_grad=False)
    monkeypatch.setattr(gpt, "get_args", lambda: args)
    monkeypatch.setattr(gpt, "get_rerun_state_machine", lambda: state)
    for length, loss in [(3, 4.0)] * 100 + [(60, 4.0), (3, 40.0)]:
        gpt.loss_function(torch.ones(1, length), torch.full((1, length), loss))
    assert state.spikes == [False] * 101 + [True]


def test_an_iteration_that_runs_again_counts_its_tokens_once(monkeypatch):
    from megatron.core.rerun_state_machine import RerunState
    from megatron.training import training

    from megatron_paradyse.train import batch

    state = argparse.Namespace(state=RerunState.INITIAL_RUN)
    monkeypatch.setattr(batch, "get_rerun_state_machine", lambda: state)
    batch.meter.take()
    for state.state in (RerunState.INITIAL_RUN, RerunState.RERUNNING_IN_PLACE):
        batch.count_lengths(torch.tensor([3, 5]), None)
    assert batch.meter.take() == [3, 5]
    assert training.consume_seqlen_stats_in_iteration() == (8, 9 + 25)


ENDS = {
    "RERUNNING_IN_PLACE": "and another as it ran again on the same device: start again from the la",
    "WILL_RERUN_FROM_CHECKPOINT": "and the same as it ran again: start again from the checkpoint",
    "RERUNNING_FROM_CHECKPOINT": "and ran again on another device: if Megatron says above that it",
    "RERUNNING_AGAIN_FROM_CHECKPOINT": "and ran again on the device that had it before: start a",
}


@pytest.mark.parametrize("state", ENDS)
@pytest.mark.parametrize(("checks", "words"), [(False, "a number, and"), (True, "a spike, and")])
def test_megatrons_end_for_a_result_says_what_was_found(checks, words, state, monkeypatch):
    from megatron.core.rerun_state_machine import RerunState

    from megatron_paradyse.train import unexpected

    args = argparse.Namespace(check_for_spiky_loss=checks, curr_iteration=4)
    machine = argparse.Namespace(state=RerunState[state])
    monkeypatch.setattr(unexpected, "get_args", lambda: args)
    monkeypatch.setattr(unexpected, "get_rerun_state_machine", lambda: machine)
    said = unexpected.ended_by_check(16)
    assert "--rerun-mode ends with code 16: a loss of iteration 5 " in said and words in said
    assert ENDS[state] in said


def test_an_iteration_after_which_megatron_ends_is_in_the_trace(tmp_path):
    """An injected error that comes again, and a second start on the same device.

    Both run the random plans that the iteration had: others would round otherwise.
    """
    trace = tmp_path / "trace.jsonl"
    flags = data_flags(tmp_path, [30] * 20)
    flags += ["--micro-batch-size", 1, "--global-batch-size", 2, "--paradyse-trace", trace]
    flags += ["--save", tmp_path / "kept", "--load", tmp_path / "kept", "--save-interval", 100]
    flags += ["--paradyse-policy", "random:1"]
    flags += ["--error-injection-type", "persistent_error", "--error-injection-rate"]
    for rate, said in ((1, "and the same as it ran"), (10**6, "and ran again on the device that")):
        run = attempt(tmp_path, *flags, rate, ranks=1)
        assert run.code == 16
        assert (
            f"error: Megatron's --rerun-mode ends with code 16: a loss of iteration 2 was not a "
            f"number, {said}" in run.stderr
        )
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    kinds = "run", "microbatch", "microbatch", "iteration"
    first, in_place = [*kinds], ["microbatch"] * 4 + ["iteration"]
    assert [record["kind"] for record in records] == [*first, *in_place, *first]
    plans = [r["plan"] for r in records if r["kind"] == "microbatch"]
    assert plans[2:4] == plans[4:6] == plans[6:8] and len(set(plans)) == 4
    ended = [r for r in records if r["kind"] == "iteration" and "exit_code" in r]
    assert [(r["iteration"], r["exit_code"]) for r in ended] == [(2, 16), (2, 16)]
    assert read_trace(str(trace)).warnings == {} and read_trace(str(trace)).iterations.count == 3
