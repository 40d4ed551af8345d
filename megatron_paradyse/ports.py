"""A port for ranks to meet at, which will still be free when they listen on it."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections import deque

LOW, HIGH = 15_000, 30_000  # below those that systems hand to outgoing connections
RESERVED = 16  # of the last ports handed out by this process: by then ranks listen on earlier ones

_reservations: deque[socket.socket] = deque()


def free_port() -> int:
    """One that nobody listens on now. Ranks listen seconds later: a port that the system chose
    could meanwhile be the end of somebody's connection, and one that two jobs chose would join
    their ranks. So no other process of this machine is given it meanwhile.

    Raises OSError when a hundred tries found none.
    """
    generator = random.SystemRandom()
    for _ in range(100):
        port = generator.randrange(LOW, HIGH)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            if _reserve(port):
                return port
    raise OSError(f"no free port between {LOW} and {HIGH}")


def without_torchrun() -> dict[str, str]:
    """The environment, less what sends ranks to the store of a torchrun's agent."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}


def _reserve(port: int) -> bool:
    """By a name that one process has, until it ends; False if another has it. Only on Linux."""
    if sys.platform != "linux":
        return True
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0megatron_paradyse port {port}")  # in no folder: gone with the process
    except OSError:
        reservation.close()
        return False
    _reservations.append(reservation)
    if len(_reservations) > RESERVED:
        _reservations.popleft().close()
    return True
