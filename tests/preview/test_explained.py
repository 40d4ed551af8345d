"""What `megatron-paradyse plan` says of a plan, and does not say where it is not so."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_paradyse.preview.explain import explanation
from megatron_paradyse.preview.forecast import UNLIMITED_MEMORY, WITHOUT, forecast
from megatron_paradyse.preview.layout import heading
from megatron_paradyse.preview.longest import find_longest
from megatron_paradyse.preview.plan_text import plan_report, plan_values
from megatron_paradyse.preview.setup import Grid, make_setup
from tests.train.synthetic_costs import write_costs

BUDGET = {"memory_budget": "150MB"}


def told(setup, *lengths: int) -> str:
    return " ".join(plan_report(setup, [forecast(setup, s) for s in lengths]).split())


def explained(setup, s: int) -> str:
    return " ".join(explanation(setup, forecast(setup, s)).split())


def test_only_what_is_extrapolated_or_does_not_fit_is_marked(costs):
    setup = make_setup(costs, BUDGET)
    plain, far = told(setup, 64), told(setup, 64, 1 << 20)
    assert not {"*", "!"} & set(plain) and "extrapolated" not in plain
    assert " 64 " in far and "1,048,576* " in far and "%! " in far
    assert "! no plan fits: see above" in far
    assert "seconds: a microbatch's layers, embedding and head, forward and backward" in plain


def test_a_plan_is_no_rival_of_itself(costs):
    """Without a limit it would be the same, and does not fit."""
    setup = make_setup(costs, {"memory_budget": "101MB", "strategies": "metp"})
    one = forecast(setup, 256)
    assert not one.outcome.fits and not one.rivals
    kinds = {r.kind for r in forecast(make_setup(costs, {"memory_budget": "101MB"}), 256).rivals}
    assert UNLIMITED_MEMORY in kinds


def test_each_half_of_a_plan_has_its_rival_without_a_strategy(costs):
    halves = set()
    for budget in ("110MB", "120MB", "150MB", "250MB"):
        setup = make_setup(costs, {"memory_budget": budget})
        for s in (64, 128, 200, 256):
            names = [r.name for r in forecast(setup, s).rivals if r.kind == WITHOUT]
            halves |= {name.split()[1] for name in names}
    assert halves == {"attention", "MLP"}


def test_without_a_budget_none_is_named(costs):
    setup = make_setup(costs, {})
    one = forecast(setup, 64)
    assert plan_values(setup, [one])["budget_bytes"] is None
    text = explained(setup, 64)
    assert "no budget" in text and " MiB fits " not in text and "With 10%" not in text
    within = explained(make_setup(costs, BUDGET), 64)
    assert " MiB fits " in within and "no budget" not in within
    peak = f"Its peak, {text.split('Its peak, ')[1].split(',')[0]}"
    assert f"{peak}, is at" in text and f"{peak} of " in within


def test_a_tenth_less_memory_may_be_too_little_for_any_plan(costs):
    setup = make_setup(costs, {"memory_budget": "108MB", "memory_margin": 0.0})
    text = explained(setup, 128)
    assert forecast(setup, 128).outcome.fits, text
    assert "With 10% less memory, 92.7 MiB: no plan fits, the least peak would be" in text


def test_parts_of_nothing_have_no_line(costs):
    for grid, waits in ((Grid(2, 1), True), (None, False)):
        setup = make_setup(costs, BUDGET, grid=grid)
        assert ("\n  in flight " in explanation(setup, forecast(setup, 64))) == waits
    stage = dataclasses.replace(setup.stage, buffer_bytes_per_token=0)
    without = dataclasses.replace(
        setup, stage=stage, policy=setup.policies.policy(stage, smooth=False)
    )
    for one, gathers in ((setup, True), (without, False)):
        assert ("\n  gather buffer " in explanation(one, forecast(one, 64))) == gathers


@pytest.mark.parametrize(("scale", "unit"), [(1.0, "att. ms"), (100.0, "att. s")])
def test_halves_of_a_second_or_more_are_told_in_seconds(scale, unit, tmp_path):
    path = str(write_costs(tmp_path / "costs.json", scale_seconds=scale))
    setup = make_setup(path, BUDGET)
    text = explanation(setup, forecast(setup, 256))
    assert unit in text and ("att. ms" in text) == (scale == 1)
    milliseconds = 5 + 0.06 * 256  # of ulysses_z, by the law of its costs
    seconds = scale * milliseconds / (1e3 if scale > 1 else 1)
    row = next(line for line in text.splitlines() if line.startswith("ulysses_z "))
    assert float(row.split()[1].replace(",", "")) == pytest.approx(seconds, rel=1e-3)


def test_where_no_strategy_may_run_on_all_layers_that_is_said(costs, tmp_path):
    config = tmp_path / "settings.yaml"
    config.write_text("layers: {1: [megatron_ts, metp], 2-4: [ulysses_z, metp+recompute]}\n")
    setup = make_setup(costs, BUDGET, str(config))
    assert "No single strategy may run on all layers." in explained(setup, 64)


def test_the_heading_counts_kinds_and_predictions_where_there_are_any(costs, tmp_path):
    plain = heading(make_setup(costs, {}))
    assert "kinds" not in plain and "multi-token" not in plain
    path = write_costs(tmp_path / "costs.json", num_predicting=1)
    assert "model: 5 layers, 1 of multi-token prediction" in heading(make_setup(str(path), {}))


def test_of_one_replica_no_wide_document_is_told(costs):
    assert find_longest(make_setup(costs, {"memory_budget": "200MB"})).wide is None
