"""`megatron-paradyse bench`: lists a checkout's benchmarks, runs them, ends what takes too long."""

from __future__ import annotations

import errno
import json
import os
import re
import select
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import common
from megatron_paradyse import bench_command, whole_file
from megatron_paradyse.cli import cli
from megatron_paradyse.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
QUICK = """'''What it measures.

More.'''
import json, sys
# options(__doc__
print("progress", file=sys.stderr)
print("more")
print(json.dumps({"benchmark": "quick", "arguments": sys.argv[1:], "rows": [1, 2]}))
"""
FAILING = "'''Fails.'''\nimport sys\nsys.exit('options(__doc__')\n"
TALKING = "'''Says no JSON.'''\nprint('options(__doc__')\n"
# A benchmark with a rank of its own, neither of which ends: both hold a pipe open.
ENDLESS = """'''Never ends.'''
import subprocess, sys
# options(__doc__
code = "import signal; p = open('alive', 'w'); p.write('x'); p.flush(); signal.pause()"
rank = subprocess.Popen([sys.executable, "-c", code])
exec(code)
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with four benchmarks, and what they import."""
    folder = tmp_path / "benchmarks"
    (folder / "results").mkdir(parents=True)
    files = {"quick": QUICK, "failing": FAILING, "talking": TALKING, "endless": ENDLESS}
    for name, text in {
        **files,
        "__init__": "",
        "common": "",
        "quick_rank": "raise SystemExit(3)",
    }.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "results/quick-cpu-2-cores.json").write_text("{}")
    monkeypatch.setattr(bench_command, "ROOT", tmp_path)
    return tmp_path


def bench(*arguments):
    return CliRunner().invoke(cli, ["bench", *arguments])


def test_the_list_holds_every_benchmark_of_this_checkout():
    found = {one["name"]: one for one in json.loads(bench("--json").stdout)["benchmarks"]}
    named = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if re.search(r"^    \.venv/bin/python benchmarks/\w+\.py --json", path.read_text(), re.M)
    }
    assert set(found) == named and len(named) >= 13
    assert found["planner"]["saved"] == ["planner-cpu-2-cores.json"]
    for one in found.values():
        assert one["summary"] in bench().stdout


def test_results_come_back_as_json_and_the_options_go_in(checkout):
    for option in ("--quick", "--save"):
        result = bench("quick", option, "--json")
        (run,) = json.loads(result.stdout)["benchmarks"]
        assert result.exit_code == 0 and run["error"] is None and run["seconds"] > 0
        assert run["result"]["arguments"] == ["--json", option]


def test_a_quick_result_replaces_no_full_one(checkout, capsys):
    result = bench("quick", "--quick", "--save")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr == (
        "error: --quick and --save: a quick result would replace the full one: give one\n"
    )
    with pytest.raises(SystemExit):
        common.options("A benchmark.").parse_args(["--quick", "--save"])
    assert "argument --save: not allowed with argument --quick" in capsys.readouterr().err


def test_a_result_that_cannot_be_saved_is_told_all_the_same(checkout):
    text = QUICK + "sys.exit('error: the disk is full')\n"
    (checkout / "benchmarks/unsaved.py").write_text(text)
    result = bench("unsaved", "--json")
    (run,) = json.loads(result.stdout)["benchmarks"]
    assert result.exit_code == 1 and run["error"] == "ended with exit code 1: see above"
    assert run["result"]["rows"] == [1, 2]


def test_a_result_is_saved_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    path = tmp_path / f"quick-{common.hardware_tag()}.json"
    path.write_text("before")
    arguments = common.options("A benchmark.").parse_args(["--save"])
    monkeypatch.setattr(whole_file.os, "replace", _full_disk)
    with pytest.raises(UserError, match="make room there"):
        common.finish("quick", {}, {}, arguments)
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1
    assert json.loads(capsys.readouterr().out)["benchmark"] == "quick"  # an hour's work


def _full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_reader_sees_the_plain_numbers(checkout):
    result = bench("quick")
    assert result.exit_code == 0
    assert "  rows: 2 entries, with --json" in result.stdout.splitlines()
    assert "quick: What it measures." in result.stderr


def test_one_that_fails_is_named_and_the_others_run(checkout):
    result = bench("failing", "talking", "quick", "--json")
    failing, talking, quick = json.loads(result.stdout)["benchmarks"]
    assert result.exit_code == 1 and quick["result"]["benchmark"] == "quick"
    assert failing["error"] == "ended with exit code 1: see above" and failing["result"] is None
    assert talking["error"] == "its last line of output is not JSON"


def test_results_of_another_form_are_errors_of_theirs_alone(checkout):
    """They ended the command, and what had run before was lost."""
    texts = {"list": b"[1]", "bytes": b"\xff"}
    for name, text in texts.items():
        code = f"'''Says.'''\n# options(__doc__\nimport os\nos.write(1, {text!r})\n"
        (checkout / f"benchmarks/{name}.py").write_text(code)
    result = bench("list", "bytes", "quick", "--json")
    ran = json.loads(result.stdout)["benchmarks"]
    assert result.exit_code == 1
    ends = ("its last line of output is no JSON object", "its last line of output is not JSON")
    assert [run["error"] for run in ran] == [*ends, None]


def test_a_benchmark_that_cannot_be_read_is_listed_with_why(checkout):
    (checkout / "benchmarks/half.py").write_bytes(b"'''Half.'''\nx = options(__doc__\n")
    (checkout / "benchmarks/latin.py").write_bytes(b"'''Caf\xe9.'''\n# options(__doc__\n")
    listed = json.loads(bench("--json").stdout)["benchmarks"]
    found = {one["name"]: one["summary"] for one in listed}
    assert found["half"].startswith("cannot be read as Python: '(' was never closed")
    assert found["latin"] == "Caf\ufffd." and found["quick"] == "What it measures."


def test_one_that_takes_too_long_is_ended_with_its_ranks(checkout):
    os.mkfifo(checkout / "alive")
    pipe = os.open(checkout / "alive", os.O_RDONLY | os.O_NONBLOCK)
    result = bench("endless", "--time-limit", "3", "--json")
    (run,) = json.loads(result.stdout)["benchmarks"]
    assert result.exit_code == 1
    assert run["error"] == "took longer than 3 s: give a larger --time-limit, or --quick"
    said = b""
    while select.select([pipe], [], [], 30)[0] and (part := os.read(pipe, 100)):
        said += part
    os.close(pipe)
    assert said == b"xx" and not part  # both began, and nobody holds it open


def test_an_installation_without_benchmarks_says_where_they_are(checkout):
    os.unlink(checkout / "benchmarks/common.py")
    result = bench()
    assert result.exit_code == 1 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "clone it, and run pip install -e ." in result.stderr


def test_results_from_a_gpu_name_its_driver_and_libraries(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 580.95.05\necho 580.95.05\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    own = {"cuda", "nccl", "driver"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not own & common.versions().keys()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    found = common.versions()
    assert {name: found[name] for name in own} == {
        "cuda": "13.0",
        "nccl": "2.28.9",
        "driver": "580.95.05",
    }
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert "driver" not in common.versions()


def test_make_bench_is_this_command():
    makefile = (ROOT / "Makefile").read_text()
    assert "$(PYTHON) -m megatron_paradyse bench --all --save" in makefile
