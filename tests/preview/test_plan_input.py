"""What `megatron-paradyse plan` is told: cost files, settings and flags, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.preview import commands
from megatron_paradyse.preview.forecast import forecast
from megatron_paradyse.preview.setup import make_setup
from megatron_paradyse.settings import GRANULARITY_CHOICES
from tests.train.synthetic_costs import write_costs

BUDGET = {"memory_budget": "150MB"}


def run(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def test_costs_of_another_loss_head_are_refused_and_their_own_is_taken(costs, tmp_path):
    told = json.loads(Path(costs).read_text())
    for tile, other in (("off", "4K"), ("64", "off"), ("64", "auto")):
        told["description"] |= {"head_tile": tile, "num_experts": 0}
        path = tmp_path / "costs.json"
        path.write_text(json.dumps(told))
        for command in (["plan", "--lengths", "64"], ["max-length"]):
            result = run(
                command[0], path, *command[1:], "--memory-budget", "1GB", "--head-tile", other
            )
            assert result.exit_code == 1 and len(result.output.splitlines()) == 1
            assert f"are of head tile {tile}: leave --head-tile out" in result.output
        setup = make_setup(str(path), BUDGET)
        assert setup.stage == make_setup(str(path), {**BUDGET, "head_tile": tile}).stage
        assert setup.stage.buffer_free_above == (None if tile == "off" else 64)
    told["description"]["num_experts"] = 4
    path.write_text(json.dumps(told))
    assert make_setup(str(path), BUDGET).stage.buffer_free_above is None


def test_parts_of_a_mixture_of_experts_need_their_static_memory(costs, tmp_path):
    """The shape does not tell how many parameters its experts are, nor on which layers."""
    told = json.loads(Path(costs).read_text())
    told["description"] |= {"head_tile": "off", "num_experts": 4}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(told))
    command = ["plan", path, "--lengths", "64", "--memory-budget", "1GB"]
    for part in ("--pipeline-stages", "--num-layers"):
        result = run(*command, part, 2)
        assert result.exit_code == 1 and len(result.output.splitlines()) == 1
        assert f"{part} 2: " in result.output and "give --static-memory" in result.output
        given = run(*command, part, 2, "--static-memory", "10MB")
        assert given.exit_code == 0 and "static 9.5 MiB, as given" in " ".join(given.output.split())
    assert run(*command).exit_code == 0


def test_a_cpu_file_has_no_budget_and_a_gpu_file_its_memory_less_a_reserve(costs, tmp_path):
    assert "memory of a rank: budget none" in run("plan", costs, "--lengths", "64").output
    file = read_cost_file(costs)
    hardware = dataclasses.replace(file.table.description.hardware, kind="cuda")
    description = dataclasses.replace(file.table.description, hardware=hardware)
    table = dataclasses.replace(file.table, description=description)
    write_cost_file(tmp_path / "gpu.json", table, file.require_model())
    setup = make_setup(str(tmp_path / "gpu.json"), {})
    assert setup.stage.budget_bytes == (1 << 33) - int(0.05 * (1 << 33))


def test_more_layers_have_more_static_bytes_and_longer_plans(costs):
    four, eight = (make_setup(costs, {}, num_layers=n) for n in (None, 8))
    assert eight.stage.static_bytes > 1.9 * four.stage.static_bytes
    assert len(forecast(eight, 64).outcome.plan.layers) == 8


def test_settings_of_a_training_are_read_from_its_yaml(costs, tmp_path):
    config = tmp_path / "settings.yaml"
    config.write_text("policy: fixed:metp\nlayers: {1-2: [metp]}\nmemory_budget: 150MB\n")
    output = run("plan", costs, "--lengths", "64", "--config", config, "--json").output
    values = json.loads(output)
    assert values["policy"] == "optimal" and values["lengths"][0]["plan"].startswith("1-2 metp")


REFUSED = {
    "strategy": (["--lengths", "64", "--strategies", "metp,foo"], "no strategy named 'foo'"),
    "unknown here": (
        ["--lengths", "64", "--strategies", "colossal_z"],
        "has no costs of colossal_z: profile it, or choose among megatron_ts",
    ),
    "lengths": (["--lengths", "1K,x"], "a count is written like 4096, 128K or 1.5M"),
    "no length": (["--lengths", "0"], "numbers from 1 to 1,099,511,627,776, such as 1K,32K,300K"),
    "zero budget": (["--lengths", "64", "--memory-budget", "0GiB"], "holds nothing: give"),
    "budget of its margin": (
        ["--lengths", "64", "--memory-budget", "1B", "--static-memory", "0B"],
        "a memory budget of 1B holds nothing",
    ),
    "static memory": (
        ["--lengths", "64", "--static-memory", "nan"],
        "'--static-memory': a size is written like 76GiB, 512MiB or 80GB, got 'nan'",
    ),
    "no room": (
        ["--lengths", "64", "--memory-budget", "50MB"],
        "parameters, gradients and optimizer take 95.1 MiB of a memory budget of 47.7 MiB",
    ),
    "policy": (["--lengths", "64", "--policy", "fixed:metp"], "does not choose by cost: give"),
    "stages": (["--lengths", "64", "--pipeline-stages", "3"], "4 layers do not divide into 3"),
    "stage": (["--lengths", "64", "--pipeline-stage", "2"], "stages are numbered from 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_with_the_remedy(case, costs):
    flags, message = REFUSED[case]
    result = run("plan", costs, *flags)
    assert result.exit_code != 0 and message in result.output
    assert len(result.output.splitlines()) == 1 and result.output.startswith("error: ")


@pytest.mark.parametrize("flags", [(), ("--pipeline-stages", 2)])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_model_has_a_layer_besides_those_of_multi_token_prediction(flags, layers, tmp_path):
    path = write_costs(tmp_path / "costs.json", num_predicting=3)
    result = run("plan", path, "--lengths", 64, "--num-layers", layers, *flags)
    assert result.output.startswith("error: a model has 4 to 100,000 layers, 3 of them of multi-")
    assert run("plan", path, "--lengths", 64, "--num-layers", 5, *flags).exit_code == 0


@pytest.mark.parametrize(("granularity", "rule"), [("layer", "share"), ("sequence", "offers")])
def test_layers_that_no_one_strategy_may_run_are_refused_in_one_line(
    granularity, rule, costs, tmp_path
):
    config = tmp_path / "settings.yaml"
    halves = "{attention: [megatron_ts, metp], mlp: [ulysses_z, metp+recompute]}"
    config.write_text(f"layers: {{1: {halves}}}\n")
    flags = ["--lengths", 64, "--config", config, "--granularity", granularity]
    (line,) = run("plan", costs, *flags).output.splitlines()
    assert line.startswith("error: ") and f"{rule}" in line and "use granularity operation" in line
    assert "internal error" not in line


def test_files_without_costs_are_refused(costs, tmp_path):
    write_cost_file(tmp_path / "raw.json", read_cost_file(costs).table)
    assert "run megatron-paradyse fit" in run("plan", tmp_path / "raw.json", "--lengths", 1).output
    assert "does not exist" in run("plan", tmp_path / "none.json", "--lengths", 1).output


def test_choices_in_the_help_are_those_of_the_settings():
    assert commands.GRANULARITIES == GRANULARITY_CHOICES


def test_nothing_to_plan_is_refused(costs):
    assert "give --lengths, --documents, or both" in run("plan", costs).output
