"""Progress of long work: a bar on a terminal, else a plain line now and then. On stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from megatron_paradyse.units import format_count

PLAIN_INTERVAL_SECONDS = 10.0
BAR_INTERVAL_SECONDS = 0.1


class Progress:
    """Shows a share of total and the documents and tokens so far.

    quiet shows nothing. update() may be called for every chunk: it draws at most ten times a
    second, and prints at most a line per ten seconds where stderr is no terminal.
    """

    def __init__(self, title: str, total: int, *, quiet: bool = False) -> None:
        self.title = title
        self.total = max(total, 1)
        self._quiet = quiet
        self._bar: Any = None
        self._last_seconds = time.monotonic()

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _terminal_bar()
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, counts="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, documents: int, tokens: int) -> None:
        interval = PLAIN_INTERVAL_SECONDS if self._bar is None else BAR_INTERVAL_SECONDS
        now = time.monotonic()
        if self._quiet or now - self._last_seconds < interval:
            return
        self._last_seconds = now
        counts = f"{documents:,} documents, {format_count(tokens)} tokens"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, counts=counts)
        else:
            share = min(done / self.total, 1.0)
            print(f"{self.title}: {share:.0%}, {counts}", file=sys.stderr, flush=True)


def _terminal_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}% {task.fields[counts]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
