"""A port for ranks to meet at, which will still be free when they listen on it."""

from __future__ import annotations

import random
import socket

LOW, HIGH = 15_000, 30_000  # below those that systems hand to outgoing connections


def free_port() -> int:
    """One that nobody listens on now. Ranks listen seconds later: a port that the system chose
    could meanwhile be the end of somebody's connection.

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
            return port
    raise OSError(f"no free port between {LOW} and {HIGH}")
