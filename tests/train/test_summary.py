"""What a training says at its end of strategies that it might have run alone."""

from __future__ import annotations

import functools

import pytest

from megatron_paradyse.costs.correction import Correction, corrected
from megatron_paradyse.hook import Planned
from megatron_paradyse.plan import LayerChoice, Plan, uniform_plan
from megatron_paradyse.planner.cost_settings import read_costs
from megatron_paradyse.planner.from_file import FilePolicies
from megatron_paradyse.settings import Settings
from megatron_paradyse.train.summary import RunningMedian, Summary
from megatron_paradyse.train.telemetry import Microbatch
from tests.train.synthetic_costs import write_costs

LENGTHS = (64, 128, 256)


def file_policies(folder, *strategies: str, budget: int = 1 << 40) -> FilePolicies:
    path = str(write_costs(folder / "costs.json"))
    settings = Settings(policy="optimal", cost_model=path, strategies=strategies or None)
    return FilePolicies(settings, read_costs(settings), budget)


def microbatch(policy, seq_length: int, layers: tuple[int, ...]) -> Microbatch:
    outcome = policy.outcome(1, seq_length, layers)
    told = (outcome.seconds, outcome.peak_bytes)
    planned = Planned(0, 0, 1, seq_length, outcome.plan, 1e-4, *told, None, policy)
    return Microbatch(planned, False, [0.0, 0.1, 0.2, 0.4])


def test_a_run_of_one_strategy_saves_nothing_over_it_however_costs_were_corrected(
    tmp_path, monkeypatch
):
    made = file_policies(tmp_path, "metp")
    correction = Correction(["metp"])
    correct = functools.partial(corrected, correction=correction)
    policy = made.policy(made.stage(), correct=correct)
    summary = Summary([policy])
    for factor in (1.0, 1.2, 1.5):
        correction.set_seconds({"metp": factor})
        policy.renew()
        summary.add([microbatch(policy, length, (1, 2)) for length in LENGTHS])
    (alone,) = summary.fixed_estimates()
    assert alone.seconds == pytest.approx(summary.predicted_seconds, rel=1e-9)
    for rounding in (1 - 1e-9, 1 + 1e-9):
        seconds = alone.seconds * rounding
        monkeypatch.setattr(Summary, "predicted_seconds", seconds)
        assert any(line.split() == ["metp", "+0.0%", "time"] for line in summary.lines())


def test_a_strategy_that_did_not_run_is_estimated_with_its_factor_of_the_time(tmp_path):
    made = file_policies(tmp_path, "metp", "metp+recompute", "megatron_ts")
    correction = Correction(["metp", "megatron_ts"])
    policy = made.policy(made.stage(), correct=functools.partial(corrected, correction=correction))
    summary, expected = Summary([policy]), 0.0
    for factor in (1.0, 1.5):
        correction.set_seconds({"metp": factor, "megatron_ts": factor})
        policy.renew()
        summary.add([microbatch(policy, length, (1, 2)) for length in LENGTHS * 2])
        base = sum(made.model.operation("metp", half, s).time_seconds for half, s in HALVES)
        expected += 2 * 2 * factor * base
    found = {one.name: one.seconds for one in summary.fixed_estimates()}
    assert found["metp"] == pytest.approx(expected)


HALVES = [(half, length) for half in ("attention", "mlp") for length in LENGTHS]


def test_shares_are_of_the_halves_of_layers_and_of_their_time():
    """A half takes half of its layer's time, whichever it is."""
    summary = Summary()
    mixed = Plan({number: LayerChoice("megatron_ts", "metp") for number in (1, 2)})
    for plan, seconds in ((uniform_plan((1, 2), "metp"), 3.0), (mixed, 1.0)):
        told = {"planner_seconds": 0.1, "predicted_seconds": None, "seconds": seconds}
        summary.count(1, 64, plan, switched=plan is mixed, **told)
    assert summary.layer_shares == {"metp": 6 / 8, "megatron_ts": 2 / 8}
    assert summary.time_shares == {"metp": 3.5 / 4, "megatron_ts": 0.5 / 4}
    first, *table = summary.lines()
    assert first == (
        "paradyse: 2 microbatches, 1 changes of plan, planning took 5.00% of the layers' time"
    )
    assert [line.split() for line in table] == [
        ["strategy", "layers", "time"],
        ["metp", "75.0%", "87.5%"],
        ["megatron_ts", "25.0%", "12.5%"],
    ]


def test_each_chunk_of_a_pipeline_stage_is_estimated_by_its_own_policy(tmp_path):
    made = file_policies(tmp_path, "metp")
    chunks = ((1, 2), (3, 4))
    roomy = [made.policy(made.stage(has_head=last)) for last in (False, True)]
    peaks = [p.uniforms(1, 256, c)["metp"].peak_bytes for p, c in zip(roomy, chunks, strict=True)]
    assert peaks[0] < peaks[1]
    made = file_policies(tmp_path, "metp", budget=int(1.03 * sum(peaks) / 2))
    policies = [made.policy(made.stage(has_head=last)) for last in (False, True)]
    summary = Summary(policies)
    summary.add([microbatch(p, 256, c) for p, c in zip(policies, chunks, strict=True)])
    (alone,) = summary.fixed_estimates()
    assert alone.num_unfit == 1


@pytest.mark.parametrize(
    ("errors", "median"),
    [
        ([], None),
        ([0.05, 0.01234, 0.2], 0.05),
        ([0.01234], 0.012),
        ([34.567], 34.6),  # not the 10 up to which tenths of a percent are counted
        ([1e9, 1e9, 0.0], 1e6),
    ],
)
def test_the_median_of_errors_is_told_however_large_they_are(errors, median):
    running = RunningMedian()
    for error in errors:
        running.add(error)
    assert running.value == median
