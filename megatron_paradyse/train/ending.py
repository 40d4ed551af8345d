"""How a rank ends: alone, because another one has gone, or without waiting for anybody."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading

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


_forking = threading.local()
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def take_helpers_along() -> None:
    """From now on a helper that the main thread forks ends with this process, however that ends.

    Helpers of a save would otherwise outlive a rank that was killed, and speak of its pipes. Those
    of other threads are left alone: to Linux the parent is the thread, which may end before.
    """
    if sys.platform == "linux":
        os.register_at_fork(before=_about_to_fork, after_in_child=_end_with_parent)


def _about_to_fork() -> None:
    main = threading.current_thread() is threading.main_thread()
    _forking.parent = os.getpid() if main else None


def _end_with_parent() -> None:
    if _forking.parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != _forking.parent:  # it ended in between
        os._exit(1)


def leave(code: int) -> None:
    """End this process without waiting for other ranks, and the helpers that it has started."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    for child in multiprocessing.active_children():
        with contextlib.suppress(Exception):
            child.terminate()
    os._exit(code)
