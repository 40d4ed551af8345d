"""Files that are there whole or not at all, whatever ends the program."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from megatron_paradyse.errors import UserError


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary name beside path, of the same suffix, which becomes path when all went well.

    Raises UserError, before anything is written, where no file of this name can be made.
    """
    path = os.fspath(path)
    check_output(path)
    folder, name = os.path.split(path)
    suffix = os.path.splitext(name)[1]
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp{suffix}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    try:
        yield temporary
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    # The name itself must survive a crash; some file systems cannot sync a folder.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a text as a whole file."""
    with whole_file(path) as temporary, open(temporary, "x", encoding="utf-8") as stream:
        stream.write(text)


def check_output(path: str | os.PathLike[str]) -> None:
    """UserError where a file of this name cannot be written: ask before long work begins."""
    path = os.fspath(path)
    folder, name = os.path.split(path)
    if not name or os.path.isdir(path):
        raise UserError(f"{path or 'an empty path'} is a folder: give the name of a file in it")
    if not os.path.isdir(folder or "."):
        raise UserError(f"{path}: there is no folder {folder}: make it, or choose another")
    if not os.access(folder or ".", os.W_OK | os.X_OK):
        raise UserError(f"{path}: the folder {folder or '.'} cannot be written to: choose another")
