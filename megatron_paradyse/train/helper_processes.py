"""Helper processes end with the rank that started them, without a word, and not before it.

Megatron's first save starts one that collects what writers did (a multiprocessing manager). Of a
rank that is killed it would stay for ever, or end with a traceback where it had just begun.
Workers of data loaders are forked from the rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.managers import BaseManager
from multiprocessing.process import BaseProcess
from typing import Any, TextIO

from megatron_paradyse.doors import opened

DEVICES = "/dev/nvidia"


def begin_worker(exit_signal: int | None, worker: int) -> None:
    """In a worker of a data loader, as in those of Megatron's.

    exit_signal: of --exit-signal-handler. A scheduler sends it to workers too, and their rank needs
    them until its checkpoint is written; PyTorch's handler would end the worker, and so the rank.
    """
    if exit_signal is not None:
        signal.signal(exit_signal, lambda *of: None)
    for descriptor in os.listdir("/proc/self/fd"):  # a worker that hangs shall hold no GPU memory
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(DEVICES):
                os.close(int(descriptor))


@contextlib.contextmanager
def managers_end_with_this_process() -> Iterator[None]:
    """Those that are started inside."""
    start = BaseManager.start

    def start_bound(
        manager: BaseManager,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        start(manager, initializer or _end_with_parent, initargs)

    with opened([(BaseManager, "start", start_bound)]):
        yield


def _end_with_parent() -> None:
    """Runs in the helper, before it serves."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def end() -> None:
        wait([parent.sentinel])
        os._exit(0)

    if not parent.is_alive():
        os._exit(0)
    sys.stderr = _WhileAlive(sys.stderr, parent)
    threading.Thread(target=end, daemon=True).start()


class _WhileAlive:
    """A stream that drops what is written once the parent has ended: a traceback, for that."""

    def __init__(self, stream: TextIO, parent: BaseProcess):
        self._stream, self._parent = stream, parent

    def write(self, text: str) -> int:
        return self._stream.write(text) if self._parent.is_alive() else len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
