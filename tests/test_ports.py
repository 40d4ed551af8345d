"""Ports for ranks to meet at."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from megatron_paradyse import ports


def draw_only(port: int, monkeypatch) -> None:
    monkeypatch.setattr(ports, "LOW", port)
    monkeypatch.setattr(ports, "HIGH", port + 1)


def test_one_that_somebody_listens_on_is_passed_over(monkeypatch):
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        taken = listening.getsockname()[1]
        draw_only(taken, monkeypatch)
        with pytest.raises(OSError, match="no free port"):
            ports.free_port()


only_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such names")


@only_linux
def test_one_that_another_process_was_given_is_passed_over(monkeypatch):
    program = "from megatron_paradyse.ports import free_port; print(free_port(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}; input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdin and other.stdout
        given = int(other.stdout.readline())
        draw_only(given, monkeypatch)
        with pytest.raises(OSError, match="no free port"):
            ports.free_port()
        other.communicate("\n", timeout=20)
    assert ports.free_port() == given, "it ended, and its ranks with it"


@only_linux
def test_a_process_that_starts_many_jobs_keeps_few_names():
    given = [ports.free_port() for _ in range(3 * ports.RESERVED)]
    assert all(ports.LOW <= port < ports.HIGH for port in given)
    assert len({*given[-ports.RESERVED :]}) == len(ports._reservations) == ports.RESERVED
