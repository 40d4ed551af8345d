"""Functions that other modules call, replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

Door = tuple[Any, str, Any]  # a module or class, a name in it, and what it is meanwhile


@contextlib.contextmanager
def opened(doors: Sequence[Door]) -> Iterator[None]:
    """What was there before comes back at the end, whatever happens inside."""
    before = [(module, name, getattr(module, name)) for module, name, _ in doors]
    try:
        for module, name, door in doors:
            setattr(module, name, door)
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)
