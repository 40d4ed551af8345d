"""What the plugin does by the words of the command line alone."""

from __future__ import annotations

import argparse
import sys

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.train import plugin
from tests.train.harness import ROOT, run_bounded
from tests.train.parsing import parsed

PATCH = ROOT / "patches" / "megatron-lm-core_v0.19.0.patch"


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
    with pytest.raises(UserError, match=r"^--yaml-cfg with --paradyse: .*: leave --yaml-cfg "):
        parse_args()


SCRIPT = """
import sys
print(sys.excepthook is sys.__excepthook__, 'megatron' in sys.modules, sys.argv[1:])
"""


@pytest.mark.parametrize("way", ["launch", "patch"])
def test_a_script_without_our_flags_runs_as_by_itself(way, tmp_path):
    """Nothing of Megatron's is touched or even read, whatever its version."""
    script = tmp_path / "pretrain_gpt.py"
    if way == "patch":
        lines = PATCH.read_text().splitlines()
        added = [line[1:] for line in lines if line.startswith(("+from", "+plugin"))]
        script.write_text("\n".join(added) + SCRIPT)
        command = [sys.executable, str(script)]
    else:
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "megatron_paradyse.launch", str(script)]
    code, stdout, stderr = run_bounded(
        [*command, "--transformer-impl", "local"], timeout_seconds=60
    )
    assert code == 0 and stdout == "True False ['--transformer-impl', 'local']\n", stderr


def test_help_is_printed_though_a_text_of_megatrons_is_no_format(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        parsed(monkeypatch, "--help")
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and "headroom (e.g. 1.10 = 10%)." in said
    assert "--paradyse-policy POLICY" in said and "(default 0.03)" in said
