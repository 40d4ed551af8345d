"""A rank that is missing is named by one of those who are left, and nobody waits for long."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from megatron_paradyse.ports import free_port
from megatron_paradyse.train import watchdog
from megatron_paradyse.train.peers import Beat
from megatron_paradyse.train.watchdog import EXIT_CODE
from tests.train.harness import run_each

LIMIT = 2.0  # seconds: a starved rank is no missing one


def run(tmp_path, fault, rank, ranks=3):
    argv = [str(LIMIT), fault, str(rank)]
    return run_each("tests.train.watched", argv, ranks=ranks, folder=tmp_path, timeout_seconds=30)


def errors(stderr):
    return [line for line in stderr.splitlines() if line.startswith("error")]


@pytest.mark.parametrize("rank", [0, 2], ids=["the rank with the store", "another"])
@pytest.mark.parametrize("fault, how", [("kill", "its process has ended"), ("stop", "stopped for")])
def test_a_missing_rank_is_named_with_the_collective_and_the_others_end(fault, how, rank, tmp_path):
    codes, _, stderr = run(tmp_path, fault, rank)
    others = [code for r, code in enumerate(codes) if r != rank]
    assert codes[rank] == (-9 if fault == "kill" else None)
    assert others == [EXIT_CODE] * 2, stderr
    (line,) = errors(stderr)
    assert f"rank {rank} of 3 is missing: {how}" in line
    assert "was in all_reduce of main (train/watched.py:" in line
    assert "Traceback" not in stderr


def test_who_is_slow_is_told_once_and_waited_for(tmp_path):
    codes, _, stderr = run(tmp_path, "slow", 1)
    assert codes == [0, 0, 0], stderr
    told = [line for line in stderr.splitlines() if line.startswith("> paradyse: rank")]
    assert len(told) == 1 and "for rank 1, which is in release (train/watched.py:" in told[0]
    assert not errors(stderr)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_measured_all_is_not_missing_while_another_writes_it(rank, tmp_path):
    codes, _, stderr = run(tmp_path, "measured", rank, ranks=2)
    assert codes == [0, 0] and not errors(stderr), stderr


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_ends_with_an_error_is_not_missing_nor_who_follows(rank, tmp_path):
    start = time.monotonic()
    codes, _, stderr = run(tmp_path, "error", rank)
    assert codes[rank] == 2 and not {0, None} & set(codes)
    assert time.monotonic() - start < 30
    (line,) = errors(stderr)
    assert "this file is wrong: give another" in line
    assert "Traceback" not in stderr


@pytest.mark.parametrize("how", ["rank 0 has ended: this file is wrong", None])
def test_who_goes_after_the_store_failed_follows_and_is_not_missing(how, monkeypatch):
    """It cannot say that it follows. Had the first rank not told of an error, all were missing."""
    monkeypatch.setattr(watchdog, "ranks", lambda: (1, 3))
    monkeypatch.setattr(watchdog, "Line", lambda *a, **o: SimpleNamespace(ask=lambda make: None))
    monkeypatch.setattr(watchdog, "_current", None)
    monkeypatch.setattr(watchdog, "state_here", lambda beat: "ended")
    dog, missing = watchdog.Watchdog(LIMIT), []
    monkeypatch.setattr(dog, "_end", missing.extend)
    for rank, end in ((0, how), (2, None)):
        dog._seen[rank], dog._since[rank] = Beat(rank, 1, "here", 1, "", end=end), time.monotonic()
    dog._look()
    assert len(missing) == (0 if how else 2)


def test_ranks_that_fail_each_in_its_own_words_say_those_of_the_first(tmp_path):
    codes, _, stderr = run(tmp_path, "errors", 0)
    assert set(codes) <= {2, EXIT_CODE} and 2 in codes, stderr
    assert len({line.partition("file")[2] for line in errors(stderr)}) == 1, stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_done_first_is_not_missing(rank):
    """Ranks with interpreters of their own, at whose end no thread can be started any more."""
    command = [sys.executable, "-m", "tests.train.watched", str(LIMIT), "early", str(rank)]
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            command, env={**os.environ, **launched, "RANK": str(own)}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for own in range(2)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], told
    assert not any("Traceback" in text or "> paradyse" in text for text in told), told
