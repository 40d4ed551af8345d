"""docs/commands.md: every command is there, every example is one that the command takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.findall(
    r"^\| `([a-z -]+)` \| .* \| `(megatron-paradyse .*)` \|$",
    (ROOT / "docs/commands.md").read_text(),
    re.M,
)


def test_every_command_is_in_the_table():
    assert {name.split()[0] for name, _ in TABLE} == set(COMMANDS)


@pytest.mark.parametrize(("name", "example"), TABLE)
def test_every_example_is_parsed_by_its_command(name, example):
    """Parsed, not run: its files need not be there."""
    words = shlex.split(example)[1:]
    assert words[: len(name.split())] == name.split()
    context = click.Context(cli)
    command: click.Command = cli
    for part in name.split():
        assert isinstance(command, click.Group)
        command = command.get_command(context, part)
    command.make_context(name, words[len(name.split()) :])


def test_a_shell_completes_commands():
    environment = {
        "_MEGATRON_PARADYSE_COMPLETE": "bash_complete",
        "COMP_WORDS": "megatron-paradyse re",
        "COMP_CWORD": "1",
    }
    result = CliRunner().invoke(cli, [], env=environment, prog_name="megatron-paradyse")
    assert result.stdout.split() == ["plain,report"]
