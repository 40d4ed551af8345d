"""What corrections, sums and traces make of packed microbatches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_paradyse.hook import Planned
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.planner.cost_settings import read_costs
from megatron_paradyse.planner.from_file import FilePolicies, planned_length
from megatron_paradyse.settings import Settings
from megatron_paradyse.train.correcting import WARM_UP, OnlineCorrection
from megatron_paradyse.train.summary import Summary
from megatron_paradyse.train.telemetry import Microbatch
from megatron_paradyse.train.trace import as_record
from tests.train.synthetic_costs import write_costs

LAYERS = (1, 2)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    path = write_costs(tmp_path_factory.mktemp("costs") / "costs.json")
    settings = Settings(policy="optimal", cost_model=str(path), sequences="packed", head_tile=128)
    return FilePolicies(settings, read_costs(settings), 1 << 40)


@pytest.fixture(scope="module")
def policy(policies):
    return policies.policy(policies.stage(), smooth=False)


def microbatch(policy, row, seconds):
    """row: or the length of a single document."""
    s, row = (row, None) if isinstance(row, int) else (row.seq_length, row)
    outcome = policy.outcome(1, s, LAYERS, row=row)
    told = (outcome.seconds, outcome.peak_bytes)
    planned = Planned(0, 0, 1, s, outcome.plan, 1e-4, *told, row, policy)
    return Microbatch(planned, False, [0.0, seconds / 3, seconds, seconds * 5 / 3])


def correction_of(policies, static_bytes=0, together=None, experts_shared=False):
    return OnlineCorrection(
        policies.costs.strategies,
        policies.model,
        operations=policies.kinds.operations,
        rows=policies.rows(),
        aligned=planned_length,
        static_bytes=lambda: static_bytes,
        beside=lambda planned: planned.seq_length / 1024,
        margin=0.03,
        renew=lambda: None,
        together=together,
        experts_shared=experts_shared,
    )


def test_a_microbatch_that_was_predicted_to_take_no_time_corrects_nothing(policies, policy):
    """A published model says so far beyond the profiled lengths; training ended by a division."""
    ran = microbatch(policy, contiguous((16,) * 16, 4), 0.5)
    ran = dataclasses.replace(ran, planned=dataclasses.replace(ran.planned, seconds=0.0))
    online = correction_of(policies)
    for _ in range(WARM_UP + 1):
        assert not online.after_iteration([ran], left=1000)
    assert not online._observations


def test_a_row_s_prediction_is_divided_among_what_its_plan_runs(policies, policy):
    ran = microbatch(policy, contiguous((16,) * 16, 4), 0.5)
    online = correction_of(policies)
    online._observe(ran)
    seen = online._observe(ran)
    assert sum(seen.predicted_seconds.values()) == pytest.approx(ran.planned.seconds)
    assert seen.measured_seconds == pytest.approx(0.5 - 256 / 1024)  # less what is beside


@pytest.mark.parametrize(
    ("took", "static", "ratio"), [(1.02, 0, None), (1.04, 0, 1.04), (2, 0.5, 3), (1.5, 0.75, 3)]
)
def test_a_peak_beyond_its_margin_is_compared_without_what_is_held_all_the_time(
    took, static, ratio, policies, policy
):
    ran = microbatch(policy, 256, 0.5)
    predicted = ran.planned.peak_bytes
    ran.peak_bytes = int(took * predicted)
    seen = correction_of(policies, int(static * predicted))._observe(ran)
    assert seen.peak_ratio == (None if ratio is None else pytest.approx(ratio, rel=1e-6))


def test_seconds_in_which_a_strategy_runs_first_correct_nothing_but_its_peak_does(policies, policy):
    """Kernels and buffers are made then; the memory that they took stays taken."""
    ran = microbatch(policy, contiguous((16,) * 16, 4), 0.5)
    ran.peak_bytes = 2 * ran.planned.peak_bytes
    online = correction_of(policies)
    first, second = online._observe(ran), online._observe(ran)
    assert first.measured_seconds is None and second.measured_seconds is not None
    assert first.peak_ratio == second.peak_ratio == pytest.approx(2.0)


def test_fixed_strategies_are_estimated_by_the_costs_of_the_row(policy):
    summary, row = Summary([policy]), contiguous((16,) * 16, 4)
    summary.add([microbatch(policy, row, 0.5)])
    alone = policy.uniforms(1, 256, LAYERS, policy.rows.load(row))
    found = {estimate.name: estimate.seconds for estimate in summary.fixed_estimates()}
    assert found == pytest.approx({name: one.seconds for name, one in alone.items()})


@pytest.mark.parametrize("refuses", ["packed rows", "what is shorter than 150"])
def test_a_strategy_that_cannot_run_a_microbatch_is_not_estimated_on_it(refuses, policies):
    """By the length that there is, though 140 and 160 tokens are planned as the same 192."""

    def runs(strategy, b, s, row):
        return strategy != "metp" or (row is None if refuses == "packed rows" else s >= 150)

    policy = policies.policy(policies.stage(), smooth=False)
    policy.runs = runs
    refused = contiguous((16,) * 16, 4) if refuses == "packed rows" else 140
    summary = Summary([policy])
    for s in (160, refused):
        summary.add([microbatch(policy, s, 0.5)])
        names = [estimate.name for estimate in summary.fixed_estimates()]
        assert ("metp" in names) == (s == 160) and "megatron_ts" in names


def test_a_record_tells_documents_and_their_tokens(policy):
    row = contiguous((10, 3, 7), 4, alignment=64)
    record = as_record(microbatch(policy, row, 0.5))
    assert (record["documents"], record["tokens"], record["seq_length"]) == (3, 20, 64)


def test_the_seconds_of_a_wide_row_correct_nothing_but_its_peak_does(policies, policy):
    """They are those of the way between replicas too, and of waiting for them."""
    row = dataclasses.replace(contiguous((250,), 8), groups=2)
    outcome = policy.outcome(1, row.group_length, LAYERS, row=row)
    told = (outcome.seconds, outcome.peak_bytes)
    planned = Planned(0, 0, 1, row.group_length, outcome.plan, 1e-4, *told, row, policy)
    ran = Microbatch(planned, False, [0.0, 5.0, 50.0, 90.0], peak_bytes=2 * outcome.peak_bytes)
    online = correction_of(policies)
    seen = online._observe(ran)
    assert seen.measured_seconds is None and seen.peak_ratio == pytest.approx(2.0)
    assert not online.correction.sums([seen]).any()
    assert online.correction.peaks([seen]).max() == pytest.approx(2.0)
    assert as_record(ran)["replicas"] == 2 and as_record(ran)["seq_length"] == row.group_length


@pytest.mark.parametrize("experts_shared", [True, False])
def test_replicas_that_run_experts_together_correct_by_the_longest_of_them(
    policies, policy, monkeypatch, experts_shared
):
    """The others wait for it in every layer, and where experts are shared hold its tokens."""

    def others(tensor, op, group):
        assert op == torch.distributed.ReduceOp.MAX and group == "replicas"
        tensor[1] *= 2  # the second microbatch of theirs

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "all_reduce", others)
    online = correction_of(policies, together="replicas", experts_shared=experts_shared)
    seen: list = []
    monkeypatch.setattr(online, "_agree", lambda explore: seen.extend(online._observations))
    monkeypatch.setattr(online.correction, "apply", lambda _: False)
    longest, other = (microbatch(policy, 256, 0.5) for _ in range(2))
    for ran in (longest, other):
        ran.peak_bytes = 2 * ran.planned.peak_bytes
    unknown = microbatch(policy, 256, 0.5)
    unknown = dataclasses.replace(unknown, planned=dataclasses.replace(unknown.planned, seconds=0))
    for taken in ([longest], [longest], [longest, other], [unknown, longest]):
        online.after_iteration(taken, left=0)
    told = [(one.measured_seconds is not None, one.peak_ratio is not None) for one in seen]
    assert told == [(True, True), (False, not experts_shared), (True, True)]
