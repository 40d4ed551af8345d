"""Signals to a command: how it ends, and what it still does on the way out."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from megatron_paradyse import cli as command_line


@pytest.fixture(autouse=True)
def handlers():
    """Those of this process stay as they were."""
    before = {ends: signal.getsignal(ends) for ends in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for ends, handler in before.items():
        signal.signal(ends, handler)


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "nohup"])
def test_a_terminal_that_closes_ends_a_command_as_a_signal_to_end_does(before, monkeypatch, capsys):
    """So that what is unfinished is removed."""

    def closed(**_):
        os.kill(os.getpid(), signal.SIGHUP)
        sys.exit(0)

    monkeypatch.setattr(command_line, "cli", closed)
    signal.signal(signal.SIGHUP, before)
    with pytest.raises(SystemExit) as left:
        command_line.main()
    ended = (left.value.code, capsys.readouterr().err)
    assert ended == ((0, "") if before == signal.SIG_IGN else (129, "error: terminated\n"))


def test_a_second_signal_does_not_cut_off_what_the_first_began(monkeypatch, capsys):
    """timeout sends two: ranks of a profile that had not been ended yet went on."""
    ended = []

    def hit(**_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            ended.append("a rank")

    monkeypatch.setattr(command_line, "cli", hit)
    with pytest.raises(SystemExit) as left:
        command_line.main()
    assert (left.value.code, ended) == (143, ["a rank"])
    assert capsys.readouterr().err == "error: terminated\n"
