"""The JSON Schema of the YAML files: made from the settings, and what editors then accept."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from megatron_paradyse.errors import UserError
from megatron_paradyse.plan_file import load_plan_file
from megatron_paradyse.schema_command import SCHEMAS
from megatron_paradyse.settings import load_yaml_settings
from megatron_paradyse.train_command import read_run

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
MODELINE = "# yaml-language-server: $schema="
TRAIN = "nproc_per_node: 2\n"
LOADERS = {"settings": load_yaml_settings, "train": read_run, "plan": load_plan_file}


def faults(kind: str, text: str) -> list[str]:
    """What an editor would underline; JSON knows no keys that are numbers."""
    instance = json.loads(json.dumps(yaml.safe_load(text)))
    return [e.message for e in jsonschema.Draft7Validator(SCHEMAS[kind]()).iter_errors(instance)]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_committed_schema_is_what_the_command_writes(kind, tmp_path):
    path = tmp_path / "schema.json"
    printed = CliRunner().invoke(cli, ["schema", kind]).stdout
    assert CliRunner().invoke(cli, ["schema", kind, "-o", str(path)]).exit_code == 0
    committed = (ROOT / f"configs/schema/{kind}.json").read_text()
    assert path.read_text() == printed == committed
    jsonschema.Draft7Validator.check_schema(json.loads(committed))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_committed_file_names_its_schema_and_follows_it(path):
    first, text = path.read_text().split("\n", 1)
    assert first.startswith(MODELINE)
    schema = (path.parent / first.removeprefix(MODELINE)).resolve()
    assert schema.parent == ROOT / "configs/schema"
    assert not faults(schema.stem, text)


RIGHT = [
    ("settings", "layers: {1-2: [metp], 5: {attention: metp, mlp: [ulysses_z+recompute]}}\n"),
    ("settings", "head_tile: off\nstrategies: megatron_ts,metp\nmemory_budget: 1.5 GiB\n"),
    ("settings", "policy: heuristic:no-mix\nhead_tile: 4K\nsmoothing: 0\n"),
    ("settings", "policy: fixed:another_packages\n"),
    ("train", TRAIN + "nnodes: '1:4'\nmaster_addr: a\n"),
    ("train", TRAIN + "megatron: {a_b: [0.3, x], c: , --d: true, e: 2e-3}\n"),
    ("train", "nproc_per_node: gpu\nrdzv_id: 7\nparadyse: {layers: {3: [metp]}}\n"),
    ("plan", "default: {attention: metp, mlp: ulysses_z}\nlayers: {3: metp+recompute}\n"),
]
WRONG = [
    ("settings", "polcy: optimal\n"),
    ("settings", "policy: [optimal]\n"),
    ("settings", "log: loud\n"),
    ("settings", "smoothing: 1.5\n"),
    ("settings", "memory_margin: true\n"),
    ("settings", "balance: 1\n"),
    ("settings", "memory_budget: 76G\n"),
    ("settings", "head_tile: 0\n"),
    ("settings", "head_tile: true\n"),
    ("settings", "strategies: []\n"),
    ("settings", "layers: {}\n"),
    ("settings", "layers: {first: [metp]}\n"),
    ("settings", "layers: {1: {mlp: [metp]}}\n"),
    ("train", "megatron: {}\n"),
    ("train", TRAIN + "gpus: 3\n"),
    ("train", "nproc_per_node: 0\n"),
    ("train", "nproc_per_node: many\n"),
    ("train", TRAIN + "master_port: 70000\n"),
    ("train", TRAIN + "start_method: thread\n"),
    ("train", TRAIN + "megatron: {'a b': 1}\n"),
    ("train", TRAIN + "megatron: {a: {b: 1}}\n"),
    ("train", TRAIN + "megatron: {paradyse-log: compact}\n"),
    ("train", TRAIN + "environment: {A=B: 1}\n"),
    ("train", TRAIN + "paradyse: {log: loud}\n"),
    ("train", TRAIN + "script: [a]\n"),
    ("plan", "{}\n"),
    ("plan", "layers: {}\n"),
    ("plan", "layer: {1: metp}\n"),
    ("plan", "layers: {1: [metp]}\n"),
    ("plan", "layers: {1: {attention: metp}}\n"),
]


@pytest.mark.parametrize(("kind", "text"), RIGHT)
def test_what_is_read_is_accepted(kind, text, tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    if "another" not in text:  # a strategy of a package that is not here
        LOADERS[kind](str(path))
    assert not faults(kind, text)


@pytest.mark.parametrize(("kind", "text"), WRONG)
def test_what_is_refused_is_refused_with_its_place_and_underlined(kind, text, tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"file\.yaml"):
        LOADERS[kind](str(path))
    assert faults(kind, text)
