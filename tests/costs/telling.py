"""What the commands that read a cost file tell of it."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from megatron_paradyse.cli import cli


def assert_commands_tell(path: Path, told: str) -> None:
    """That plan and max-length do, with exit code 0."""
    for command in (("plan", "--lengths", "4K"), ("max-length", "--memory-budget", "1GiB")):
        name, *flags = command
        said = CliRunner().invoke(cli, [name, str(path), *flags])
        assert said.exit_code == 0, said.output
        assert told in " ".join(said.output.split())
