"""Which folder Megatron reads a checkpoint from, and how it reads a tracker that was cut off."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

from megatron.training import checkpointing

from megatron_paradyse.doors import opened
from megatron_paradyse.megatron_start import say_once
from megatron_paradyse.train.checkpoint_files import TRACKER, iteration_to_load
from megatron_paradyse.whole_file import write_whole

LOAD, PRETRAINED = "--load", "--pretrained-checkpoint"


def source(args: argparse.Namespace) -> tuple[str, str | None]:
    """The flag that names the folder, and the folder: where --load has no checkpoint, Megatron
    begins with the weights of --pretrained-checkpoint.
    """
    if args.pretrained_checkpoint is None or checkpointing.checkpoint_exists(args.load):
        return LOAD, args.load
    return PRETRAINED, args.pretrained_checkpoint


@contextlib.contextmanager
def whole(folder: str | None, wanted: int | None, *, flag: str) -> Iterator[None]:
    """While Megatron reads this folder, which the flag names; wanted: --ckpt-step.

    It reads the tracker even where --ckpt-step says more, and ends where that was cut off: then it
    reads the newest checkpoint that is whole. In the legacy format it reads the states of a
    distributed optimizer, and where to go on, by the tracker alone: --ckpt-step is what it finds
    there. UserError where what is to be loaded is not whole.
    """
    mended = None if folder is None else iteration_to_load(folder, wanted, flag=flag)
    iteration = mended if wanted is None else wanted
    if folder is None or iteration is None:
        yield
        return
    if mended is not None:
        which = ", the newest that is whole" if wanted is None else ""
        say_once(f"{folder}/{TRACKER} was cut off: loading iteration {iteration}{which}")
    tracker = checkpointing.get_checkpoint_tracker_filename(folder)
    read = checkpointing.read_metadata

    def read_mended(path: str) -> tuple[int, bool]:
        return (iteration, False) if path == tracker else read(path)

    with opened([(checkpointing, "read_metadata", read_mended)]):
        yield
    if wanted is None and os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # others' folders may be there to read alone
            write_whole(f"{folder}/{TRACKER}", str(iteration))
