"""Views of buffers that a failed write leaves behind, on which Python 3.12.1 crashes."""

from __future__ import annotations

import contextlib
import gc


def release_byte_buffers() -> None:
    """Release every view of an io.BytesIO: what wrote them has failed.

    Where a write fails, as on a full disk, the traceback ties such a view to itself, and Python
    3.12.1 crashes when its garbage collector comes to that: the rank would end without a word.
    """
    for item in gc.get_objects():
        if type(item) is memoryview and type(_viewed(item)).__name__ == "_BytesIOBuffer":
            with contextlib.suppress(BufferError):
                item.release()


def _viewed(view: memoryview) -> object:
    try:
        return view.obj
    except ValueError:  # released
        return None
