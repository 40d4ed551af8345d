"""docs/commands.md: every command is there, every example is one that the command takes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import COMMANDS, cli
from megatron_paradyse.option_types import BATCH_SIZES

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


def leaves(group: click.Group, *path: str):
    """(names, command) of every command that does something."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from leaves(command, *path, name)
        else:
            yield (*path, name), command


LEAVES = dict(leaves(cli))


@pytest.mark.parametrize("names", LEAVES, ids=" ".join)
def test_every_help_has_an_example_and_a_word_on_every_option(names):
    output = CliRunner().invoke(cli, [*names, "--help"]).output
    text = "".join(output.split())  # lines are cut at hyphens too
    assert re.search(rf"Examples?:megatron-paradyse{''.join(names)}", text)
    options = [p for p in LEAVES[names].params if isinstance(p, click.Option)]
    assert all(option.help for option in options)


@pytest.mark.parametrize("names", [n for n in LEAVES if n != ("schema",)], ids=" ".join)
def test_every_command_speaks_to_machines(names):
    """schema prints nothing but JSON."""
    flags = {flag for parameter in LEAVES[names].params for flag in parameter.opts}
    assert "--json" in flags


@pytest.mark.parametrize("names", LEAVES, ids=" ".join)
def test_one_option_has_one_name_everywhere(names):
    """--output is also -o, and what it is called where a prefix is written."""
    flags = [set(parameter.opts) for parameter in LEAVES[names].params]
    for name in ("--output", "--output-prefix"):
        assert all("-o" in opts for opts in flags if name in opts)


def test_no_help_imports_torch_megatron_or_xgboost():
    """In one fresh process, all of them."""
    script = f"""
import sys
from click.testing import CliRunner
from megatron_paradyse.cli import cli
for names in {list(LEAVES)}:
    result = CliRunner().invoke(cli, [*names, "--help"])
    assert result.exit_code == 0 and "Usage:" in result.output, result.output
    heavy = {{"torch", "megatron", "xgboost", "matplotlib"}} & set(sys.modules)
    assert not heavy, (names, heavy)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_batch_size_given_twice_counts_once():
    assert BATCH_SIZES.parse("2,1,2") == (2, 1)


def test_a_shell_completes_commands():
    environment = {
        "_MEGATRON_PARADYSE_COMPLETE": "bash_complete",
        "COMP_WORDS": "megatron-paradyse re",
        "COMP_CWORD": "1",
    }
    result = CliRunner().invoke(cli, [], env=environment, prog_name="megatron-paradyse")
    assert result.stdout.split() == ["plain,report"]
