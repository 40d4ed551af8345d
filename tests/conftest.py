"""The order of the test files."""

from __future__ import annotations

# Files of these folders take minutes: begun first, so that no worker is left alone with one.
SLOW = ("train", "preview", "profiler")


def pytest_collection_modifyitems(items: list) -> None:
    items.sort(key=lambda item: item.path.parent.name not in SLOW)
