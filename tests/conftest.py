"""The order of the test files, and Ctrl-C as at a terminal."""

from __future__ import annotations

import contextlib
import os
import signal

# Files of these folders take minutes: begun first, so that no worker is left alone with one.
SLOW = ("train", "preview", "profiler")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In a job that a shell started with & it is ignored, and so in all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if hasattr(os, "SCHED_BATCH"):
    # Woken threads of gloo, of more ranks than cores, would push aside the rank whose lock they
    # then try again and again: some tenth of what trainings take of the processors.
    with contextlib.suppress(OSError):  # where it is not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_modifyitems(items: list) -> None:
    items.sort(key=lambda item: item.path.parent.name not in SLOW)
