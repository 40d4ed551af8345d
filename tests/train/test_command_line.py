"""What the plugin does by the words of the command line alone."""

from __future__ import annotations

import argparse
import sys

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.train import plugin


@pytest.fixture
def parse_args():
    """Wrapped as Megatron's, of a run that its YAML file describes."""
    plugin.install()
    arguments = argparse.Namespace(
        parse_args=lambda provider, ignored: argparse.Namespace(yaml_cfg="run.yaml"),
        validate_args=None,
    )
    plugin._wrap_parsing(arguments, on_cpu=False)
    return arguments.parse_args


def test_a_run_of_megatrons_yaml_file_is_left_alone(parse_args, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt", "--yaml-cfg", "run.yaml"])
    args = parse_args()
    assert (args.paradyse, args.paradyse_model) == (False, "gpt")


@pytest.mark.parametrize("words", [["--yaml-cfg", "run.yaml"], ["--yaml-cfg=run.yaml"]])
def test_megatrons_yaml_file_is_refused_with_paradyse(words, parse_args, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *words, "--paradyse"])
    with pytest.raises(UserError, match="^--yaml-cfg with --paradyse: .*: leave --yaml-cfg out"):
        parse_args()
