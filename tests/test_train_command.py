"""`megatron-paradyse train`: a strict file, and exactly the command that it says."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from megatron_paradyse.settings import WITHOUT_FLAG, Settings, load_yaml_settings
from megatron_paradyse.train_command import read_run

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SMALL = "nproc_per_node: 2\nmegatron: {num-layers: 2}\n"


def written(tmp_path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def dry_run(*arguments: str):
    return CliRunner().invoke(cli, ["train", "--dry-run", *arguments])


def test_the_example_gives_the_command_it_describes():
    launch = read_run(str(ROOT / "configs/train-demo.yaml"), ["--train-iters", "2"])
    assert launch.environment == {"OMP_NUM_THREADS": "1"}
    assert launch.command[:6] == [*TORCHRUN, "--standalone", "--nproc-per-node", "4"]
    assert launch.command[6:8] == ["-m", "megatron_paradyse.pretrain_gpt"]
    flags = launch.command[8:]
    assert flags[flags.index("--lr") + 1] == "2e-3"
    assert flags[flags.index("--split") + 1] == "98,1,1"
    assert flags[flags.index("--sequence-parallel") + 1] == "--num-layers"
    assert flags[flags.index("--paradyse") + 1 :][:2] == ["--paradyse-policy", "fixed:ulysses_z"]
    assert flags[-2:] == ["--train-iters", "2"]


def test_the_printed_line_is_read_by_a_shell_as_the_command(tmp_path):
    text = SMALL + "environment: {NAME: \"a 'b' $c\"}\n"
    path = written(tmp_path, text + "paradyse: {trace: 'my trace;rm.jsonl'}\n")
    result = dry_run(path, "--", "--load", "two words")
    assert result.exit_code == 0
    words = shlex.split(result.stdout)
    launch = read_run(path, ["--load", "two words"])
    assert words == ["NAME=a 'b' $c", *launch.command]


def test_machines_get_the_command_as_json(tmp_path):
    path = written(tmp_path, SMALL + "environment: {NAME: x}\n")
    values = json.loads(dry_run("--json", path).stdout)
    assert values == {"command": read_run(path).command, "environment": {"NAME": "x"}}
    refused = CliRunner().invoke(cli, ["train", path, "--json"])
    assert refused.exit_code == 2 and "--dry-run" in refused.stderr


def test_values_stay_as_they_are_written(tmp_path):
    megatron = (
        "megatron:\n  lr: 1e-4\n  a: 0010\n  b: 1_000\n  c: 12:30\n  data_path: [0.3, x, 0.7]\n"
    )
    path = written(tmp_path, "nproc_per_node: 1\n" + megatron + "  d: true\n  e: false\n  f:\n")
    flags = read_run(path).command
    start = flags.index("--lr")
    expected = "--lr 1e-4 --a 0010 --b 1_000 --c 12:30 --data-path 0.3 x 0.7 --d"
    assert flags[start:] == expected.split()


def test_a_rendezvous_or_a_script_replaces_the_defaults(tmp_path):
    several = "nnodes: 2\nrdzv_backend: c10d\nrdzv_endpoint: host:29400\n"
    command = read_run(written(tmp_path, SMALL + several + "script: pretrain_gpt.py\n")).command
    assert "--standalone" not in command
    assert shlex.join(command[3:]).startswith(
        "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host:29400 "
        "-m megatron_paradyse.launch pretrain_gpt.py --num-layers 2"
    )
    assert "--paradyse" not in command


@pytest.mark.parametrize(
    "meeting",
    ["master_addr: a\n", "rdzv_endpoint: a:1\n", "environment: {PET_MASTER_ADDR: a}\n"],
)
def test_nodes_that_are_told_where_to_meet_are_started(meeting, tmp_path):
    command = read_run(written(tmp_path, SMALL + "nnodes: 2\n" + meeting)).command
    assert "--standalone" not in command and command[3:5] == ["--nnodes", "2"]
    assert read_run(written(tmp_path, SMALL + "nnodes: 1\n")).command[3] == "--standalone"


def test_every_setting_reaches_the_training(tmp_path):
    """As flags that Megatron's parser would read, or through the file itself."""
    settings = {
        "policy": "optimal",
        "strategies": ["metp", "ulysses_z"],
        "layers": {"1-2": ["metp"]},
        "granularity": "layer",
        "mixing_gain": 0.1,
        "cost_model": "c.json",
        "accept_costs": True,
        "memory_budget": "119MiB",
        "host_memory": "64GiB",
        "memory_margin": 0.05,
        "over_budget": "refuse",
        "smoothing": 0.1,
        "verify_plans": True,
        "watchdog_seconds": 60,
        "balance": True,
        "correction": False,
        "profile": False,
        "offload": True,
        "trace": "t.jsonl",
        "log": "compact",
        "sequences": "documents",
        "pack_tokens": "64K",
        "spread": 2,
        "order": "bucketed",
        "long_documents": "split",
        "head_tile": False,
        "mask_token": 103,
    }
    assert set(settings) == set(Settings.__dataclass_fields__)
    path = written(tmp_path, SMALL + "paradyse: " + json.dumps(settings) + "\n")
    flags = read_run(path).command
    pairs = dict(itertools.pairwise(flags))
    assert pairs["--paradyse-memory-budget"] == "119MiB"
    assert pairs["--paradyse-strategies"] == "metp,ulysses_z"
    assert pairs["--paradyse-memory-margin"] == "0.05"
    assert pairs["--paradyse-head-tile"] == "off"
    assert pairs["--paradyse-mask-token"] == "103"
    assert pairs["--paradyse-spread"] == "2"
    assert pairs["--paradyse-accept-costs"].startswith("--")
    assert {"--paradyse-no-correction", "--paradyse-no-profile"} < set(flags)
    assert pairs["--paradyse-config"] == path
    for name in set(settings) - {*WITHOUT_FLAG, "correction", "profile"}:
        assert f"--paradyse-{name.replace('_', '-')}" in flags
    assert load_yaml_settings(path)["layers"][2].mlp == ("metp",)


WRONG = {
    "nothing": ("", "a run is described by 'key: value' lines"),
    "list": ("- 1\n", "line 1: a run is described by"),
    "no ranks": ("megatron: {}\n", "nproc_per_node is missing"),
    "unknown": (SMALL + "gpus: 3\n", "line 3: a run has no 'gpus': use nnodes"),
    "twice": (SMALL + "nproc_per_node: 3\n", "line 3: nproc_per_node is there twice"),
    "flag twice": ("nproc_per_node: 1\nmegatron:\n  a-b: 1\n  a_b: 2\n", "line 4: a_b is there"),
    "flag no flag": ("nproc_per_node: 1\nmegatron:\n  'a b': 1\n", "line 3: 'a b' is no flag"),
    "flag of ours": ("nproc_per_node: 1\nmegatron:\n  paradyse-log: x\n", "belongs under paradyse"),
    "mapping": ("nproc_per_node: 1\nmegatron:\n  a: {b: 1}\n", "line 3: --a: expected a number"),
    "no mapping": ("nproc_per_node: 1\nmegatron: 3\n", "line 2: megatron is described by"),
    "setting": (SMALL + "paradyse:\n  polcy: x\n", ":4: unknown key 'polcy'"),
    "setting's value": (SMALL + "paradyse:\n  log: loud\n", ":4: log: 'loud' is not one of"),
    "settings": (SMALL + "paradyse: 3\n", ":3: expected 'key: value' lines"),
    "environment": (SMALL + "environment: {A=B: 1}\n", "line 3: 'A=B' is no name of a variable"),
    "script": (SMALL + "script: [a]\n", "line 3: script: expected a text"),
    "ranks": ("nproc_per_node: {a: 1}\n", "line 1: nproc_per_node: expected a number or a text"),
    "no rank": ("nproc_per_node: 0\n", "line 1: nproc_per_node: '0' is not a whole number from 1"),
    "many": ("nproc_per_node: many\n", "line 1: nproc_per_node: 'many' is not a whole number"),
    "nodes": (SMALL + "nnodes: 4:2\n", "line 3: nnodes: '4:2' is not a number of nodes"),
    "apart": (SMALL + "nnodes: 2\nnode_rank: 1\n", "line 3: nnodes: 2 nodes are not told where"),
    "more apart": (SMALL + "nnodes: 1:4\n", "1:4 nodes are not told where to meet: give rdzv_"),
    "port": (SMALL + "master_port: 70000\n", "line 3: master_port: '70000' is not a whole number"),
    "not YAML": ("a: [", "is not YAML"),
    "tag": ("nproc_per_node: !!python/name:os.system 1\n", "line 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line_with_its_place(name, tmp_path):
    text, message = WRONG[name]
    result = dry_run(written(tmp_path, text))
    lines = [line for line in result.stderr.splitlines() if line]
    assert result.exit_code == 1 and result.stdout == ""
    assert len(lines) == 1 and message in lines[0] and "run.yaml" in lines[0], result.stderr


def test_without_dry_run_the_process_becomes_the_command(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "execve", lambda *arguments: seen.append(arguments))
    path = written(tmp_path, SMALL + "environment: {OMP_NUM_THREADS: 3}\n")
    result = CliRunner().invoke(cli, ["train", path])
    ((program, command, environment),) = seen
    assert result.exit_code == 0 and program == sys.executable
    assert result.stdout.strip() == "OMP_NUM_THREADS=3 " + shlex.join(command)
    assert environment["OMP_NUM_THREADS"] == "3" and environment["PATH"] == os.environ["PATH"]
