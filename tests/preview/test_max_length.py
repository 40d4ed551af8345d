"""`megatron-paradyse max-length`: the limits are those of the predicted peaks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from megatron_paradyse.costs.cost_file import write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.table import OOM
from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import parse_runs
from megatron_paradyse.planner.problem import TooLargeError
from megatron_paradyse.preview.forecast import alone
from megatron_paradyse.preview.longest import PARADYSE, find_longest, longest
from megatron_paradyse.preview.measured import FITS, TrialFile
from megatron_paradyse.preview.setup import make_setup
from megatron_paradyse.preview.trials import NO_HOST_ROOM, Options, _Rank
from tests.costs.synthetic import make_table
from tests.preview.test_measured import ABOUT
from tests.train.synthetic_costs import LAWS, write_costs


def run(*arguments):
    return CliRunner().invoke(cli, ["max-length", *(str(a) for a in arguments)])


@pytest.mark.parametrize("batch_size", [1, 2])
def test_limits_fit_and_one_step_more_does_not(batch_size, costs):
    setup = make_setup(costs, {"memory_budget": "400MB"})
    found = find_longest(setup, batch_size)
    step = found.alignment

    def problem(tokens):
        return setup.policy.problem(setup.layers, batch_size, tokens, False)

    assert {limit.strategy for limit in found.single} == set(setup.policies.costs.strategies)
    for limit in found.single:
        assert alone(problem(limit.tokens))[limit.strategy].fits and limit.tokens % step == 0
        assert not alone(problem(limit.tokens + step))[limit.strategy].fits
    ours = found.paradyse.tokens
    assert setup.policy.planner.plan(problem(ours)).fits
    assert not setup.policy.planner.plan(problem(ours + step)).fits
    assert ours >= max(limit.tokens for limit in found.single) > 0


def test_a_mix_of_strategies_reaches_further_than_any_alone(costs):
    """Halves that keep little beside halves that need little: by the laws of the costs."""
    found = find_longest(make_setup(costs, {"memory_budget": "1GB"}))
    ratio = found.ratio()
    assert ratio is not None and ratio >= 1
    assert found.ratio(recompute=False) > 1.5  # +recompute keeps a quarter of what metp does


def test_offload_reaches_furthest_and_is_told_apart(tmp_path):
    """Costs of a GPU whose rate of copies is known; --no-offload leaves it out."""
    path = write_costs(tmp_path / "costs.json", host_bytes_per_second=1e9, kind="cuda")
    arguments = (path, "--memory-budget", "600MB", "--num-layers", 16)
    told = " ".join(run(*arguments).output.split())
    assert "times as far as the best one without +offload, metp+recompute" in told
    with_it = json.loads(run(*arguments, "--json").output)
    without = json.loads(run(*arguments, "--no-offload", "--json").output)
    assert "of host memory a rank hold inputs of its layers" in told
    layers = parse_runs(with_it["paradyse"]["plan"]).layers.values()
    num_offloading = sum(choice.attention == "metp+offload" for choice in layers)
    kept = LAWS["metp+recompute"][2] * with_it["paradyse"]["tokens"]
    assert with_it["paradyse_host_bytes"] == pytest.approx(num_offloading * kept, rel=1e-3)
    assert num_offloading > 2 and without["paradyse_host_bytes"] == 0
    tokens = {row["strategy"]: row["tokens"] for row in with_it["single"]}
    assert max(tokens, key=tokens.__getitem__) == "metp+offload"
    assert tokens["metp+offload"] > 1.5 * tokens["metp+recompute"]
    assert with_it["paradyse"]["tokens"] > without["paradyse"]["tokens"]
    assert "metp+offload" not in {row["strategy"] for row in without["single"]}
    assert with_it["ratio_to_best_single_without_offload"] > with_it["ratio_to_best_single"]


def rank_of(setup, most_seconds=None):
    """One that tries nothing by itself: no model is there."""
    trials = object.__new__(_Rank)
    trials._setup, trials._found = setup, SimpleNamespace(batch_size=1)
    trials._file = TrialFile(None, ABOUT)
    trials._options = Options("unused", 0.02, most_seconds, stand_in=False, only=None)
    trials._writes, trials._report = False, lambda told: None
    return trials


def test_a_trial_of_another_plan_is_made_again(costs, monkeypatch):
    """As of other --strategies, or of an earlier version: its limit was told as this one's."""
    again = []

    def tried(self, name, plan, tokens):
        again.append(plan.runs())
        return self.empty(name, tokens, FITS, plan.runs())

    monkeypatch.setattr(_Rank, "_try", tried)
    trials = rank_of(make_setup(costs, {"memory_budget": "400MB"}))
    planned = trials._planned(PARADYSE, 1_024).plan.runs()
    trials.record(trials.empty(PARADYSE, 1_024, OOM, "1-4 of_before"))
    assert trials.fits(PARADYSE, 1_024) and again == [planned]
    assert trials.fits(PARADYSE, 1_024) and len(again) == 1  # it is known now
    trials.record(trials.empty(PARADYSE, 1_024, OOM))  # it ended a rank alone: no plan is known
    assert not trials.fits(PARADYSE, 1_024) and len(again) == 1
    trials.record(trials.empty(PARADYSE, 1_024, NO_HOST_ROOM))  # the host has room now
    assert trials.fits(PARADYSE, 1_024) and len(again) == 2


def test_a_trial_of_another_plan_that_would_take_too_long_now_is_forgotten(costs):
    trials = rank_of(make_setup(costs, {"memory_budget": "400MB"}), most_seconds=1e-9)
    trials.record(trials.empty(PARADYSE, 1_024, FITS, "1-4 of_before"))
    assert trials.fits(PARADYSE, 1_024) is None
    assert not trials._file.trials


def test_a_strategy_ends_where_the_host_has_no_room_for_all_its_layers(tmp_path):
    """Of 16 layers at 1,024 tokens; the GPU alone would take more, and fewer layers do."""
    path = str(write_costs(tmp_path / "costs.json", host_bytes_per_second=1e9, kind="cuda"))
    flags = {"memory_budget": "600MB"}
    input_bytes = make_setup(path, flags).stage.input_bytes_per_token
    flags |= {"host_memory": str(int(16 * 1_024 * input_bytes))}
    setup = make_setup(path, flags, num_layers=16)
    found = find_longest(setup)
    single = {limit.strategy: limit.tokens for limit in found.single}
    assert single["metp+offload"] == 1_024 < found.paradyse.tokens

    trials = rank_of(setup)
    assert trials.fits("metp+offload", 1_088) is False
    assert trials._file.trials["metp+offload", 1_088].status == NO_HOST_ROOM


def test_the_longest_is_found_behind_lengths_that_do_not_fit():
    """Where the head begins to go in tiles, more tokens can need less."""
    assert longest(lambda s: s <= 640 or 1024 <= s <= 5000, 64) == 4992
    assert longest(lambda s: False, 64) == 0
    assert longest(lambda s: s <= 64, 64) == 64
    with pytest.raises(UserError, match="tokens still fit"):
        longest(lambda s: True, 64)


def test_lengths_beyond_what_is_counted_do_not_fit():
    def fits(tokens: int) -> bool:
        if tokens > 5000:
            raise TooLargeError(f"{tokens}")
        return True

    assert longest(fits, 64) == 4992


def test_what_is_beyond_whole_numbers_of_bytes_is_refused_and_no_limit(costs):
    """Sums of bytes are exact below 2^53; the search for a limit tries longer microbatches."""
    setup = make_setup(costs, {"memory_budget": "150MB"})
    with pytest.raises(
        UserError, match=r"^s=1,073,741,824, b=1,048,576: its layers may hold .*fewe"
    ):
        setup.policy.plan(1 << 20, 1 << 30, setup.layers)
    found = find_longest(setup, 1 << 12)
    assert found.paradyse.tokens == 0 and not any(limit.tokens for limit in found.single)


def test_score_rows_beyond_whole_numbers_of_bytes_hide_no_other_strategy(tmp_path):
    """They grow with s squared: of the longest sequences of others they are beyond 2^53 bytes."""
    others = ["ulysses_z", "metp", "metp+recompute"]
    table = make_table(strategies=["colossal_z", *others])
    path = tmp_path / "costs.json"
    write_cost_file(path, table, fit_table(table))
    found, expected = (
        find_longest(make_setup(str(path), {"memory_budget": "400GB", **settings}), spread=2)
        for settings in ({}, {"strategies": others})
    )
    assert found.wide is not None and expected.wide is not None
    assert found.paradyse.tokens == expected.paradyse.tokens > 1 << 23
    assert found.wide.tokens == expected.wide.tokens > 1 << 24
    singles = {limit.strategy: limit.tokens for limit in found.single}
    assert singles.pop("colossal_z") < 1 << 20
    assert singles == {limit.strategy: limit.tokens for limit in expected.single}


def test_what_is_extrapolated_is_marked(costs):
    output = run(costs, "--memory-budget", "200MB").output
    assert "extrapolated by the fitted model" in " ".join(output.split())
    rows = {line.split()[0]: line for line in output.splitlines() if "%" in line}
    assert "*" in rows["metp+recompute"] and "*" not in rows["megatron_ts"]
    values = json.loads(run(costs, "--memory-budget", "200MB", "--json").output)
    marked = {row["strategy"] for row in values["single"] if row["tokens"] > 256}
    assert marked == {row["strategy"] for row in values["single"] if row["extrapolated"]}


def test_a_budget_that_nothing_fits_says_so(costs):
    output = run(costs, "--memory-budget", "100.1MB", "--memory-margin", 0).output
    assert "Not even 64 tokens fit: give a larger budget" in output
    assert output.count("none fits") == 5


def test_without_a_budget_there_is_no_limit(costs):
    result = run(costs)
    assert result.exit_code == 1 and "give --memory-budget, such as 76GiB" in result.output


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_figure_is_drawn_all_or_nothing(suffix, costs, tmp_path):
    path = tmp_path / f"longest{suffix}"
    result = run(costs, "--memory-budget", "400MB", "--figure", path)
    assert result.exit_code == 0, result.output
    assert path.stat().st_size > 5000 and [p.name for p in tmp_path.iterdir()] == [path.name]
    refused = run(costs, "--memory-budget", "400MB", "--figure", tmp_path / "x.gif")
    assert "a figure ends in .png, .svg or .pdf" in refused.output


def test_learned_positions_are_told_to_grow_with_the_length(tmp_path, costs):
    values = json.loads(Path(costs).read_text())
    values["description"]["model"]["position_embedding"] = "learned"
    learned = tmp_path / "learned.json"
    learned.write_text(json.dumps(values))
    budget = ("--memory-budget", "400MB")
    words = "give --static-memory, as training says"
    assert words in " ".join(run(learned, *budget).stdout.split())
    for known in ((costs, *budget), (learned, *budget, "--static-memory", "100MB")):
        assert words not in " ".join(run(*known).stdout.split())


def test_a_document_over_replicas_may_be_as_many_times_as_long(costs):
    """Nearly: its ranks hold keys of others, and the table of angles is of the whole document."""
    arguments = (costs, "--memory-budget", "400MB")
    found = json.loads(run(*arguments, "--spread", 4, "--json").output)
    alone, wide = found["paradyse"]["tokens"], found["spread"]
    assert wide["replicas"] == 4 and 3 * alone < wide["tokens"] <= 4 * alone
    choices = parse_runs(wide["plan"]).layers.values()
    assert wide["peak_bytes"] <= 400e6 and choices
    told = " ".join(run(*arguments, "--spread", 4).output.split())
    assert f"over 4 replicas (--paradyse-spread 4), a document may have {wide['tokens']:,}*" in told
    assert wide["extrapolated"]
    assert "spread" not in json.loads(run(*arguments, "--json").output)
    refused = run(*arguments, "--spread", 4, "--batch-size", 2).output
    assert "--spread 4 with --batch-size 2: a packed microbatch is one row" in refused
