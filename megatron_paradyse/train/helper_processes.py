"""Helper processes end with the rank that started them, without a word.

Megatron's first save starts one that collects what writers did (a multiprocessing manager). Of a
rank that is killed it would stay for ever, or end with a traceback where it had just begun.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.managers import BaseManager
from multiprocessing.process import BaseProcess
from typing import Any, TextIO


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

    BaseManager.start = start_bound  # type: ignore[assignment]
    try:
        yield
    finally:
        BaseManager.start = start  # type: ignore[method-assign]


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
