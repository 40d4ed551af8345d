"""A write that fails leaves nothing on which the garbage collector crashes."""

from __future__ import annotations

import gc
import io

import pytest

from megatron_paradyse.train.byte_buffers import release_byte_buffers


def test_a_view_tied_to_itself_by_a_traceback_is_released():
    """Without it Python 3.12.1 ends here by a segmentation fault."""
    views = []

    def write() -> None:
        view = io.BytesIO(b"x" * 1000).getbuffer()
        views.append(id(view))
        try:
            raise OSError("disk full")
        except OSError as error:
            kept = error  # noqa: F841 - the frame holds the error, whose traceback holds the frame
            raise

    gc.disable()
    try:
        write()
    except OSError:
        release_byte_buffers()
    finally:
        gc.enable()
    (view,) = (v for v in gc.get_objects() if id(v) in views and type(v) is memoryview)
    with pytest.raises(ValueError, match="released"):
        _ = view.obj
    del view
    assert gc.collect() > 0
