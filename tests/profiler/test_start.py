"""Which ranks measure: those of a launcher, or those that --nproc starts; how they end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.profiler import start
from megatron_paradyse.train.uncaught import SECONDS_TO_BE_ENDED

LEFT = ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")


@pytest.fixture
def environ(monkeypatch):
    """This process's environment, without a launcher's variables, to be changed."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in LEFT})
    return os.environ


def test_nproc_is_not_replaced_by_what_another_launcher_left(environ):
    """A world of one measured one rank alone in the place of two, and said nothing."""
    assert start.ranks_there(2) == 2 and start.ranks_there(None) == 0
    environ["WORLD_SIZE"] = "1"
    assert start.ranks_there(2) == 2 and start.ranks_there(None) == 0
    environ["RANK"] = "0"
    assert start.ranks_there(1) == start.ranks_there(None) == 1
    with pytest.raises(UserError, match=r"--nproc 2 .* RANK=0 and WORLD_SIZE=1 .* unset both"):
        start.ranks_there(2)


def test_ranks_started_here_meet_at_a_store_of_their_own(environ, tmp_path, monkeypatch):
    """They waited ten minutes for the store of an agent that was gone."""
    environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "node9", "A": "1"}
    code = "import os, sys; print(*(os.environ.get(name) for name in sys.argv[4:]))"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    names = ["-", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "WORLD_SIZE", "A"]
    start.start_ranks(names, ranks=2, output=tmp_path / "raw.json")
    said = (tmp_path / "raw.json.log").read_text().splitlines()
    assert said == ["None 127.0.0.1 2 1"] * 2


CODE = """
import time
from megatron_paradyse.errors import UserError
from megatron_paradyse.profiler.start import as_rank
def work(report):
    raise UserError("this disk has no model.yaml")
time.sleep = lambda seconds: print("waited", seconds)
as_rank(work)
"""


@pytest.mark.parametrize(("rank", "waited"), [("0", ""), ("1", f"waited {SECONDS_TO_BE_ENDED}\n")])
def test_what_is_wrong_on_one_rank_alone_is_said(rank, waited):
    """By others than the first nothing was said, even where the first had not failed."""
    environment = {**os.environ, "RANK": rank, "WORLD_SIZE": "2", start.PROGRESS_FD: "2"}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    of = " (rank 1)" if rank == "1" else ""
    assert done.stderr.splitlines()[-1] == f"error{of}: this disk has no model.yaml"
    assert (done.returncode, done.stdout) == (2, waited)
