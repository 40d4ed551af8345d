"""`megatron-paradyse plan`: the policy of training, asked beforehand."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.table import BYTES_ONLY, CostTable, Measurement
from megatron_paradyse.packing.placement import alignment, place
from megatron_paradyse.preview.explain import explanation
from megatron_paradyse.preview.forecast import UNIFORM, UNLIMITED_MEMORY, WITHOUT, forecast
from megatron_paradyse.preview.layout import WIDTH
from megatron_paradyse.preview.longest import find_longest
from megatron_paradyse.preview.peak_parts import peak_parts
from megatron_paradyse.preview.plan_text import plan_report, why_it_lost
from megatron_paradyse.preview.setup import Grid, make_setup
from megatron_paradyse.settings import GRANULARITY_CHOICES
from megatron_paradyse.strategies import base_name, recomputes
from tests.costs.synthetic import CONSTANTS, DESCRIPTION
from tests.train.synthetic_costs import write_costs

LENGTHS = (16, 64, 200, 256, 512)
BUDGET = {"memory_budget": "150MB"}


def run(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


@pytest.mark.parametrize("command", [["plan", "--lengths", "64,256"], ["max-length"]])
def test_the_commands_load_neither_torch_nor_megatron_nor_xgboost(command, costs):
    script = (
        "import sys\n"
        "from megatron_paradyse.cli import cli\n"
        f"cli({[command[0], costs, *command[1:], '--memory-budget', '150MB']}, "
        "standalone_mode=False)\n"
        "print(sorted({n.split('.')[0] for n in sys.modules} & {'torch', 'megatron', 'xgboost'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr


@pytest.mark.parametrize("policy", ["optimal", "heuristic", "heuristic:no-mix"])
@pytest.mark.parametrize("granularity", GRANULARITY_CHOICES)
def test_forecasts_are_what_the_policy_answers(policy, granularity, costs):
    setup = make_setup(costs, {**BUDGET, "policy": policy, "granularity": granularity})
    for s in LENGTHS:
        for forward_only in (False, True):
            expected = setup.policy.outcome(1, s, setup.layers, forward_only=forward_only)
            assert forecast(setup, s, forward_only=forward_only).outcome == expected


def test_rivals_lose_by_time_or_by_memory(costs):
    kinds = set()
    for budget in ("120MB", "150MB", "250MB"):
        setup = make_setup(costs, {"memory_budget": budget})
        for s in LENGTHS:
            one = forecast(setup, s)
            for rival in one.rivals:
                kinds.add(rival.kind)
                assert rival.outcome.plan != one.outcome.plan
                if rival.kind == UNLIMITED_MEMORY:
                    assert not rival.outcome.fits
                elif one.outcome.fits and rival.outcome.fits:
                    assert rival.outcome.seconds >= one.outcome.seconds * (1 - 1e-9)
                if rival.kind == WITHOUT:
                    name, half = rival.name.split()
                    choices = rival.outcome.plan.layers.values()
                    assert name not in {getattr(c, half.lower()) for c in choices}
    assert kinds == {UNIFORM, UNLIMITED_MEMORY, WITHOUT}


def test_no_plan_lost_that_is_the_chosen_one_by_other_names(tmp_path):
    """Where both halves recompute the MLP's name says nothing of where the input waits."""
    path = write_costs(tmp_path / "costs.json", kind="cuda", host_bytes_per_second=5e8)
    seen = set()
    for budget in ("120MB", "130MB", "150MB", "200MB"):
        setup = make_setup(str(path), {"memory_budget": budget})
        for s in (128, 256):
            one = forecast(setup, s)
            for rival in one.rivals:
                halves = [
                    {(c.attention, base_name(c.mlp) if recomputes(c.attention) else c.mlp)}
                    for outcome in (one.outcome, rival.outcome)
                    for c in outcome.plan.layers.values()
                ]
                assert halves[: len(halves) // 2] != halves[len(halves) // 2 :]
            seen |= {c.mlp for c in one.outcome.plan.layers.values()}
    assert any(map(recomputes, seen)), seen


@pytest.mark.parametrize("how", [{"policy": "heuristic"}, {"granularity": "sequence"}])
def test_no_plan_lost_that_is_not_of_what_all_layers_offer(how, costs, tmp_path):
    """What was left of each layer without metp was told to be a plan, and a faster one."""
    config = tmp_path / "settings.yaml"
    config.write_text("layers: {1: [megatron_ts, metp], 2-4: [ulysses_z, metp]}\n")
    one = forecast(make_setup(costs, {**BUDGET, **how}, str(config)), 64)
    assert one.outcome.plan.runs() == "1-4 metp" and one.rivals == ()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.5, "50.0% faster, but"), (1.0, "as fast, but"), (2.0, "100.0% slower, and")],
)
def test_a_rival_that_is_too_large_is_that_besides_being_slower(seconds, said, costs):
    one = forecast(make_setup(costs, {"memory_budget": "150MB"}), LENGTHS[0])
    other = dataclasses.replace(
        one.outcome, seconds=seconds * one.seconds - one.edge_seconds, exceeds_bytes=1 << 30
    )
    assert why_it_lost(one, other) == f"{said} exceeds the budget by 1.00 GiB"


def test_a_plan_of_one_strategy_that_mixing_gains_too_little_over_says_so(costs):
    """Nothing is said where mixing gains enough."""
    exact = forecast(make_setup(costs, {**BUDGET, "mixing_gain": 0.0}), 200)
    least = 1 - exact.outcome.seconds / best_single(costs, 200)
    assert least > 0.01
    for gain, kept in ((least * 1.01, True), (least * 0.99, False), (0.0, False)):
        setup = make_setup(costs, {**BUDGET, "mixing_gain": gain})
        one = forecast(setup, 200)
        assert one.kept_single(setup) == kept
        assert (one.outcome.seconds == exact.outcome.seconds) != kept
        assert ("lost: by these costs" in plan_report(setup, [one])) == kept
        assert ("Mixing strategies would gain less" in explanation(setup, one)) == kept
        assert "Proved" not in explanation(setup, one)


def best_single(costs, tokens: int) -> float:
    """Seconds of the fastest plan of one strategy, with its variants, that fits."""
    found = []
    for names in ("megatron_ts", "ulysses_z", "metp,metp+recompute"):
        setup = make_setup(costs, {**BUDGET, "strategies": names})
        outcome = forecast(setup, tokens, rivals=False).outcome
        found += [outcome.seconds] if outcome.fits else []
    return min(found)


GRIDS = {"one stage": Grid(), "first of 2": Grid(2, 1), "last of 2": Grid(2, 2, 8)}


def test_peaks_of_a_stage_without_a_budget_are_of_one_microbatch_and_say_so(costs):
    """As with room for any others they would be shares of no limit at all."""
    told = {}
    for stages in (1, 2):
        setup = make_setup(costs, {}, grid=Grid(stages, 1))
        one = forecast(setup, 64)
        told[stages] = " ".join(plan_report(setup, [one]).split())
        assert one.outcome.peak_bytes < 1 << 30 and peak_parts(setup, one).in_flight == 0
    note = "peaks leave out what the other microbatch in flight may keep: give --memory-budget"
    assert "2 microbatches in flight" in told[2]
    assert note in told[2] and "in flight" not in told[1]
    last = make_setup(costs, {}, grid=Grid(2, 2))
    assert "1 microbatch in flight" in plan_report(last, [forecast(last, 64)])
    setup = make_setup(costs, BUDGET, grid=Grid(2, 1))
    assert "peaks leave out" not in plan_report(setup, [forecast(setup, 64)])


def test_what_was_never_timed_is_extrapolated(costs, tmp_path):
    """A batch size that no measurement has; and lengths of which only bytes were measured."""
    setup = make_setup(costs, BUDGET)
    assert forecast(setup, 64).profiled and not forecast(setup, 64, 2).profiled
    assert find_longest(setup, 2).paradyse.extrapolated
    table = read_cost_file(costs).table
    points = [
        m
        if m.seq_length <= 128
        else dataclasses.replace(m, status=BYTES_ONLY, forward_seconds=0.0, backward_seconds=0.0)
        for m in table.measurements
    ]
    table = dataclasses.replace(table, measurements=tuple(points))
    path = tmp_path / "costs.json"
    write_cost_file(path, table, fit_table(table))
    setup = make_setup(str(path), BUDGET)
    assert forecast(setup, 128).profiled and not forecast(setup, 192).profiled
    output = " ".join(
        run("plan", path, "--memory-budget", "150MB", "--lengths", 192).output.split()
    )
    assert "what was timed of this plan (of all: 16 to 128 tokens, 1 per microbatch)" in output


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("forward_only", [False, True])
def test_the_parts_of_a_peak_are_its_sum(grid, forward_only, costs):
    for budget in ("110MB", "150MB"):
        setup = make_setup(costs, {"memory_budget": budget}, grid=GRIDS[grid])
        for s in LENGTHS:
            one = forecast(setup, s, forward_only=forward_only)
            parts = peak_parts(setup, one)
            sizes = [value for value in vars(parts).values() if isinstance(value, int)]
            assert sum(sizes) == one.outcome.peak_bytes and min(sizes) >= 0
            assert bool(parts.in_flight) == (grid == "first of 2" and not forward_only)


def test_explanations_name_costs_fits_peak_and_other_budgets(costs):
    setup = make_setup(costs, BUDGET)
    text = explanation(setup, forecast(setup, 250))
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert text.startswith("250 tokens, 1 per microbatch; planned as 256\n")
    # by the law of tests/train/synthetic_costs.py: 12 + 0.12 s ms; 3,000 and 20,000 bytes a token
    half = ["42.72", "0.732", "4.883"]
    assert any(line.split() == ["metp+recompute", *half, *half] for line in text.splitlines())
    assert "The fastest single strategy, ulysses_z, exceeds the budget by 67.4" in " ".join(
        text.split()
    )
    assert rows["static"][:2] == ["95.1", "MiB"]  # 1e8 less the buffer at 256 tokens
    for words in (
        "Lost: with unlimited memory, 1-4 ulysses_z: ",
        "With 10% more memory, 157.4 MiB",
    ):
        assert words in text
    assert "With 10% less memory, 128.7 MiB: 1-4 metp, 4.4% slower" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_an_explanation_of_a_later_stage_names_the_input_it_received(costs):
    setup = make_setup(costs, BUDGET, grid=GRIDS["last of 2"])
    lines = explanation(setup, forecast(setup, 250)).splitlines()
    rows = {line.split()[0] for line in lines if line.strip()}
    assert "input" in rows and "embedding" not in rows


def test_reports_are_at_most_100_columns_and_say_where_costs_come_from(costs):
    output = run("plan", costs, "--lengths", "64,256,1M", "--memory-budget", "150MB").output
    text = " ".join(output.split())  # lines break where the file's path lets them
    assert "simulated 2026-11-21: 4 x synthetic" in text
    assert "1,048,576*" in text and "extrapolated by the fitted model" in text
    assert "no plan fits: the least peak is" in output
    assert max(len(line) for line in output.splitlines() if "costs.json" not in line) <= WIDTH


def test_the_heading_says_what_plans_are_given_of_either_memory(tmp_path):
    costs = write_costs(tmp_path / "costs.json", host_bytes_per_second=1e9, kind="cuda")
    memory = ("--memory-budget", "150MiB", "--memory-margin")
    output = run("plan", costs, "--lengths", "64", *memory, "0.5", "--host-memory", "2GiB").output
    text = " ".join(output.split())
    assert "150.0 MiB (as given), plans within 100.0 MiB, as peaks may be 50.0% above" in text
    assert "; 2.00 GiB of host memory for +offload" in text
    plain = " ".join(run("plan", costs, "--lengths", "64", *memory, "0").output.split())
    assert "150.0 MiB (as given); static" in plain and "host memory" not in plain


@pytest.mark.parametrize(
    ("rate", "kind", "flags", "why"),
    [
        (None, "cuda", (), "has no costs of any: leave it out, or profile"),
        (1e9, "cpu", (), "no plan may name any: leave it out, or set offload: true"),
        (1e9, "cuda", ("--no-offload",), "no plan may name any"),
        (1e9, "cuda", ("--strategies", "metp"), "no plan may name any"),
        (1e9, "cuda", ("--strategies", "metp,metp+offload"), None),
    ],
)
@pytest.mark.parametrize("command", [("plan", "--lengths", "64"), ("max-length",)])
def test_host_memory_that_no_plan_would_use_is_refused(tmp_path, command, rate, kind, flags, why):
    costs = write_costs(tmp_path / "costs.json", host_bytes_per_second=rate, kind=kind)
    name, *more = command
    result = run(name, costs, *more, *flags, "--memory-budget", "150MB", "--host-memory", "2GiB")
    assert result.exit_code == (1 if why else 0), result.output
    if why:
        assert "host memory of 2GiB has no effect" in result.output and why in result.output


def test_that_no_other_strategy_may_run_is_not_that_none_fits(costs):
    flags = ("--lengths", "64", "--memory-budget", "150MB", "--strategies")
    assert "no other strategy may run" in run("plan", costs, *flags, "metp").output
    assert "no other strategy" not in run("plan", costs, *flags, "metp,megatron_ts").output


def test_json_holds_what_the_table_says(costs):
    result = run("plan", costs, "--lengths", "64,256", "--memory-budget", "150MB", "--json")
    values = json.loads(result.output)
    assert values["source"] == "simulated" and values["budget_bytes"] == 150_000_000
    for row in values["lengths"]:
        parts = [size for size in row["peak"].values() if isinstance(size, int)]
        assert sum(parts) == row["peak_bytes"] and row["rivals"]
        assert row["seconds"] == pytest.approx(row["layer_seconds"] + row["edge_seconds"])


def test_a_published_model_may_predict_no_time_at_all(tmp_path):
    """Its polynomials fall below zero far out; the comparison with other plans divided by it."""
    path = str(tmp_path / "costs.json")
    measured = [
        Measurement(strategy, half, s, 1, "ok", seconds, 2 * seconds, *(more * s,) * 3)
        for s, seconds in ((1024, 1.0), (2048, 2.1), (4096, 3.6), (8192, 4.2))
        for strategy, halves, more in (
            ("megatron_ts", ("attention", "mlp"), 1000.0),
            ("metp", ("attention", "mlp"), 500.0),
            ("model", ("embedding", "head"), 1.0),
        )
        for half in halves
    ]
    table = CostTable(DESCRIPTION, measured, CONSTANTS)
    write_cost_file(path, table, fit_table(table, "paper"))
    setup = make_setup(path, {})
    assert forecast(setup, 32768).seconds == 0.0
    output = run("plan", path, "--lengths", "32K", "--explain").output
    assert "metp: as fast, peak" in " ".join(output.split())


def test_documents_are_planned_as_the_row_that_training_would_make(costs):
    documents = (20, 30, 25, 28, 40, 100)
    text = ",".join(map(str, documents))
    values = json.loads(run("plan", costs, "--documents", text, "--lengths", "64", "--json").output)
    alone, packed = values["lengths"]
    assert "documents" not in alone and packed["documents"] == len(documents)
    setup = make_setup(costs, {}, packed=True)
    p = setup.description.p
    row = place(documents, p, causal=True, alignment=alignment(p))
    assert packed["seq_length"] == row.seq_length
    outcome = setup.policy.outcome(1, row.seq_length, setup.layers, row=row)
    assert (packed["plan"], packed["layer_seconds"]) == (outcome.plan.runs(), outcome.seconds)
    printed = run("plan", costs, "--documents", text, "--explain").output
    assert f"{sum(documents)} tokens in 6 documents" in printed
    assert "20 tokens in 1 document:" in run("plan", costs, "--documents", "20").output
    assert "1 token in 1 document:" in run("plan", costs, "--documents", "1").output


def test_documents_over_replicas_are_planned_as_the_wide_row_of_training(costs):
    """By strategies that run one; the parts of its peak are all of it."""
    options = ("--documents", "600,20", "--spread", 2, "--memory-budget", "1GB")
    (wide,) = json.loads(run("plan", costs, *options, "--json").output)["lengths"]
    assert (wide["replicas"], wide["documents"]) == (2, 2) and "local_z" not in wide["plan"]
    (alone,) = json.loads(run("plan", costs, *options[:2], *options[4:], "--json").output)[
        "lengths"
    ]
    assert 2 * wide["seq_length"] >= 620 and wide["peak_bytes"] < alone["peak_bytes"]
    for one in (wide, alone):
        parts = {name: value for name, value in one["peak"].items() if name != "place"}
        assert sum(parts.values()) == pytest.approx(one["peak_bytes"], abs=2)
        assert parts["in_flight"] == 0
    printed = run("plan", costs, *options, "--explain").output
    assert "620 tokens in 2 documents, over 2 replicas" in printed
    refused = run("plan", costs, "--lengths", "1K", "--spread", 2).output
    assert "--spread 2 is of packed documents: give --documents too" in refused
