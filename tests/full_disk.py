"""A disk that is full."""

from __future__ import annotations

import contextlib
import resource


@contextlib.contextmanager
def largest_file(size):
    """As on a full disk, of which a part of what is written is taken."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
