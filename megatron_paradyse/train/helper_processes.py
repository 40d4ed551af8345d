"""Helper processes end with the rank that started them, without a word.

Megatron's first save starts one that collects what writers did (a multiprocessing manager). Of a
rank that is killed it would stay for ever, or end with a traceback where it had just begun.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.managers import BaseManager
from typing import Any


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
    threading.Thread(target=end, daemon=True).start()
