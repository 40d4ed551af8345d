"""What a rank has started ends with it and says nothing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize("when", ["starting", "serving", "never"])
def test_a_manager_ends_with_its_process_without_a_word(when):
    """The pipes of a helper that stays would stay open, and run() would wait for them."""
    command = [sys.executable, "-m", "tests.train.managing", when]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == (0 if when == "never" else -signal.SIGKILL)
    assert ended.stderr == ""
    assert (ended.stdout == "") == (when == "starting")
