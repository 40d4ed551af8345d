"""What ranks tell of themselves to the others, and what can be seen of those on this machine."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

STOPPED = ("T", "t")
ENDED = ("Z", "X", "x")


@dataclass
class Beat:
    """One sign of life.

    still_seconds: since anything moved; end: how it ended, if it did; heard: it has read how the
    first rank ended, whose process may hold the store.
    """

    rank: int
    number: int
    machine: str
    process: int
    started: str
    where: str = "starting"
    waits: bool = False
    still_seconds: float = 0.0
    end: str | None = None
    heard: bool = False

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, content: bytes) -> Beat:
        return cls(**json.loads(content))


def own_beat(rank: int) -> Beat:
    """The first sign of this process."""
    return Beat(rank, 0, machine(), os.getpid(), _state(os.getpid())[1])


@cache
def machine() -> str:
    """The host's name and whose process numbers it counts: containers of a host differ."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = "?"
    return f"{socket.gethostname()} {namespace}"


def state_here(beat: Beat) -> str | None:
    """ "ended", "stopped" or "runs", of a rank on this machine; None where it cannot be seen."""
    if beat.machine != machine() or not Path("/proc/self/stat").exists():
        return None
    letter, started = _state(beat.process)
    if letter in ENDED or started != beat.started:
        return "ended"
    return "stopped" if letter in STOPPED else "runs"


def _state(process: int) -> tuple[str, str]:
    """The state of a process and the time it was started at, as /proc has them."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "X", ""
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], fields[19]
