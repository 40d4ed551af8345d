"""How a rank ends: alone, because another one has gone, or without waiting for anybody."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys

LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited",
    "Socket Timeout",
    "Timed out waiting",
    "wait timeout after",
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of a collective says only that another rank has gone, or never came."""
    return isinstance(error, RuntimeError) and any(cause in str(error) for cause in LOST)


def leave(code: int) -> None:
    """End this process without waiting for other ranks, and the helpers that it has started."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    for child in multiprocessing.active_children():
        with contextlib.suppress(Exception):
            child.terminate()
    os._exit(code)
