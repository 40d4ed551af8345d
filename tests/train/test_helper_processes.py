"""What a rank has started ends with it and says nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from megatron_paradyse.train import helper_processes


@pytest.mark.parametrize("when", ["starting", "serving", "never"])
def test_a_manager_ends_with_its_process_without_a_word(when):
    """The pipes of a helper that stays would stay open, and run() would wait for them."""
    command = [sys.executable, "-m", "tests.train.managing", when]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == (0 if when == "never" else -signal.SIGKILL)
    assert ended.stderr == ""
    assert (ended.stdout == "") == (when == "starting")


def test_a_worker_of_a_loader_holds_no_device(tmp_path, monkeypatch):
    """It has the rank's open files, a GPU's too."""
    monkeypatch.setattr(helper_processes, "DEVICES", str(tmp_path / "nvidia"))
    opened = {
        name: os.open(tmp_path / name, os.O_CREAT | os.O_RDWR)
        for name in ("nvidia0", "nvidiactl", "data.bin")
    }
    helper_processes.begin_worker(None, 0)
    left = [name for name, descriptor in opened.items() if is_open(descriptor)]
    os.close(opened["data.bin"])
    assert left == ["data.bin"]


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
