"""scripts/demo.sh, setup.sh and reproduce_all.sh do what they are asked for and no more.

They remove nothing of a user's.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def run(tmp_path):
    """A script in a folder whose .venv only says how it was called, and then fails."""
    for script in ("demo.sh", "setup.sh", "reproduce_all.sh"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        shutil.copy(SCRIPTS / script, tmp_path / "scripts")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "called: $*"\n[ "$1" = -c ]\n')
    python.chmod(0o755)

    def start(script: str, *arguments: str, **variables: str):
        return subprocess.run(
            ["bash", f"scripts/{script}", *arguments],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", **variables},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return start


@pytest.mark.parametrize("script", ["demo.sh", "setup.sh"])
def test_help_and_unknown_arguments_run_nothing(script, run):
    told = run(script, "--help")
    assert told.returncode == 0 and told.stdout and "#" not in told.stdout
    assert "called" not in told.stdout and not told.stderr
    wrong = run(script, "--quick")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and not wrong.stdout
    assert wrong.stderr.startswith(f"error: {script} takes no argument, got --quick: ")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_all_results_is_told_once_and_removes_no_costs(flag, run, tmp_path):
    kept = tmp_path / "build/reproduction/costs.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    told = run("reproduce_all.sh", "--simulate", flag)
    assert told.stdout == "called: -m reproduction table3 --help\n" and kept.exists()


@pytest.mark.parametrize("variables", [{"RANKS": "two"}, {"ITERATIONS": "0"}])
def test_a_demo_with_a_variable_that_is_no_number_is_refused(variables, run, tmp_path):
    wrong = run("demo.sh", **variables)
    ((name, value),) = variables.items()
    assert wrong.returncode == 2 and not (tmp_path / "demo-output").exists()
    assert wrong.stderr == f"error: {name}={value} is no number: give 1 or more\n"


def test_a_demo_removes_only_what_a_demo_has_written(run, tmp_path):
    kept = tmp_path / "mine" / "thesis.txt"
    kept.parent.mkdir()
    kept.write_text("years of work")
    for folder in ("mine", "mine/thesis.txt"):
        wrong = run("demo.sh", OUT=folder)
        assert wrong.returncode == 2 and kept.read_text() == "years of work"
        assert wrong.stderr.startswith(f"error: OUT={folder} is there and not of an earlier demo: ")
    (tmp_path / "empty").mkdir()
    for _ in range(2):  # what it begins with fails here; the second finds the first one's folder
        begun = run("demo.sh", OUT="empty")
        assert "called: -m megatron_paradyse data prepare" in begun.stdout, begun.stderr
        (tmp_path / "empty" / "corpus.bin").touch()
