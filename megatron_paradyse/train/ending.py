"""How a rank ends: alone, because another one has gone, out of memory, or without waiting."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from typing import TYPE_CHECKING

from megatron_paradyse.errors import UserError
from megatron_paradyse.units import printable

if TYPE_CHECKING:
    from megatron_paradyse.train.watchdog import Watchdog

LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited",
    "Socket Timeout",
    "Timed out waiting",
    "wait timeout after",
    # NCCL's watchdog, a wait that blocks, and PyTorch 2.15's other process group of NCCL.
    "collective operation timeout",
    "timed out in blocking wait",
    "NCCL operation timed out",
)

# What PyTorch, CUDA, cuBLAS and NCCL say in errors that have no class of their own.
NO_MEMORY = ("out of memory", "allocate memory", "ALLOC_FAILED")


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of a collective says only that another rank has gone, or never came."""
    return isinstance(error, RuntimeError) and any(cause in str(error) for cause in LOST)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: the allocator's, the device's outside of it, pinned or the host's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in NO_MEMORY)


def current_watchdog() -> Watchdog | None:
    """This process's, where it has one; watchdog.py, which loads torch, is not imported for it."""
    module = sys.modules.get("megatron_paradyse.train.watchdog")
    return None if module is None else module.current()


def words_of(error: BaseException) -> str:
    """What it says, in one line that any stream and store takes.

    PyTorch puts the traceback of a loader's worker before the words of an error there.
    """
    said = str(error)
    if said.startswith(f"Caught {UserError.__name__} in DataLoader worker"):
        said = said.rpartition(f"{UserError.__name__}: ")[2]
    return printable(" ".join(said.split()))[:2000]


def leave(code: int) -> None:
    """End this process without waiting for other ranks, and the helpers that it has started."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    for child in multiprocessing.active_children():
        with contextlib.suppress(Exception):
            child.terminate()
    os._exit(code)
