"""When the files of a checkpoint are listed: all are written, and its tracker does not name it yet.

Listed later, a save that a kill ends between the two would leave a checkpoint that is written over
for not whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.training import checkpointing

from megatron_paradyse.doors import opened
from megatron_paradyse.train.checkpoint_files import list_files

_TRACKS = "iter_finalize_fn"  # of what follows a save in the background: writes the tracker


@contextlib.contextmanager
def listed_at_once(checkpoint: Path) -> Iterator[None]:
    """Of a save that runs inside.

    When all ranks have written their files Megatron asks for the tracker's name.
    """
    find, listed = checkpointing.get_checkpoint_tracker_filename, False

    def list_once() -> None:
        nonlocal listed
        if not listed and checkpoint.is_dir():
            list_files(checkpoint)
            listed = True

    def list_and_find(folder: str) -> str:
        list_once()
        return find(folder)

    with opened([(checkpointing, "get_checkpoint_tracker_filename", list_and_find)]):
        yield
    list_once()


@contextlib.contextmanager
def listed_when_written(checkpoint: Path) -> Iterator[None]:
    """Of a save in the background that is begun inside.

    Megatron hands what follows the last file (its metadata, the tracker) over with the request.
    """
    schedule = checkpointing.schedule_async_save

    def schedule_with_list(request: Any) -> Any:
        then = request.finalize_fns
        if then:  # else they come with another request, of logits
            names = [getattr(function, "__name__", "") for function in then]
            place = names.index(_TRACKS) if _TRACKS in names else len(then)
            then.insert(place, functools.partial(list_files, checkpoint))
        return schedule(request)

    with opened([(checkpointing, "schedule_async_save", schedule_with_list)]):
        yield
