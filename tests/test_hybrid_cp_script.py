"""scripts/hybrid_cp.sh: Megatron takes the flags of both of its runs on 8 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.harness import write_documents

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = "#!/usr/bin/env bash\nprintf '%s\\n' torchrun \"$@\"\n"
PARSE = """
import json, sys
from megatron_paradyse.train import plugin
plugin.install()
from megatron.training import arguments
for words in json.load(sys.stdin):
    sys.argv = ["pretrain_gpt.py", *words]
    args = arguments.parse_args(None, True)
    args = arguments.validate_args(args, {})
    print(json.dumps([args.paradyse, args.hybrid_context_parallel, args.data_parallel_size]))
"""


@pytest.fixture
def commands(tmp_path):
    """What torchrun would run, as lists of words."""
    write_documents(tmp_path / "corpus", [20] * 10)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(TORCHRUN)
    torchrun.chmod(0o755)
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout/pretrain_gpt.py").touch()
    variables = {"MEGATRON": "checkout", "DATA": tmp_path / "corpus", "LOGS": tmp_path / "logs"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {name: str(value) for name, value in variables.items()}
    script = ["bash", str(ROOT / "scripts/hybrid_cp.sh")]
    done = subprocess.run(
        script,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return [part.split("\n")[:-1] for part in done.stdout.split("torchrun\n")[1:]]


def test_megatron_takes_the_flags_of_both_runs(commands):
    peer, ours = commands
    assert peer[:4] == ["--standalone", "--nproc-per-node", "8", "checkout/pretrain_gpt.py"]
    assert ours[:5] == [*peer[:3], "-m", "megatron_paradyse.pretrain_gpt"]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "8", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps([peer[4:], ours[5:]]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert parsed == [[False, True, 8], [True, False, 1]]


def run(*arguments: str, **variables: str):
    """The script with none of its variables but these."""
    return subprocess.run(
        ["bash", str(ROOT / "scripts/hybrid_cp.sh"), *arguments],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_what_is_missing_is_named():
    done = run()
    assert done.returncode == 2
    assert done.stderr.startswith("error: MEGATRON is not set: give a Megatron-LM checkout")


def test_help_asks_for_no_variable_and_arguments_are_refused():
    for flag in ("-h", "--help"):
        told = run(flag)
        assert told.returncode == 0 and not told.stderr and "#" not in told.stdout
        assert "MEGATRON=path/to/Megatron-LM DATA=data/code" in told.stdout
    wrong = run("--iterations")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and not wrong.stdout
    assert wrong.stderr.startswith("error: hybrid_cp.sh takes no argument, got --iterations: ")


def test_a_checkout_or_data_that_is_not_there_is_told_in_a_line(tmp_path):
    (tmp_path / "pretrain_gpt.py").touch()
    checkout = {"MEGATRON": str(tmp_path)}
    for variables, said in (
        ({"MEGATRON": "/none", "DATA": "/none"}, "MEGATRON=/none has no pretrain_gpt.py"),
        ({**checkout, "DATA": "/none"}, "/none.bin does not exist: give DATA as the prefix"),
    ):
        done = run(**variables)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1
