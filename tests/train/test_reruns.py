"""What Megatron's rerun state machine is told: spikes of the loss; iterations that run again."""

from __future__ import annotations

import argparse
import functools

import pytest
import torch

from megatron_paradyse.train import plugin


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
