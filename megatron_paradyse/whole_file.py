"""Files that are there whole or not at all, whatever ends the program."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
from collections.abc import Iterator, Sequence

from megatron_paradyse.errors import UserError

FIGURES = (".png", ".svg", ".pdf")
HEAD_BYTES = 8192
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp(\.\w+)?", re.DOTALL)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary name beside path, of the same suffix, which becomes path when all went well.

    A link stays one: the file that it names is written. Raises UserError where no file of this name
    can be written; nothing stays behind then.
    """
    path = os.fspath(path)
    check_output(path)
    target = os.path.realpath(path)
    temporary = temporary_path(target) + os.path.splitext(path)[1].lower()
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise UserError(
                f"{path} cannot be written: {error.strerror or error}: choose another place, or "
                "make room there"
            ) from error
        raise
    # The name itself must survive a crash; some file systems cannot sync a folder.
    with contextlib.suppress(OSError):
        sync(os.path.dirname(target))


def temporary_path(path: str | os.PathLike[str]) -> str:
    """A hidden name beside path that no other process takes, of any machine that sees the folder.

    In containers process ids are alike.
    """
    folder, name = os.path.split(os.fspath(path))
    unique = f"{socket.gethostname()}.{secrets.token_hex(8)}"
    return os.path.join(folder, f".{name}.{unique}.tmp")


def is_temporary(name: str) -> bool:
    """Whether a file of this name is one of temporary_path's: being written, or left behind."""
    return TEMPORARY.fullmatch(name) is not None


def sync(path: str) -> None:
    """Wait until the disk has what was written to a file, or the names of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a text as a whole file."""
    with whole_file(path) as temporary, open(temporary, "x", encoding="utf-8") as stream:
        stream.write(text)


def append_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Add to a file all or nothing, at once: lines of two ranks do not mix.

    OSError where it cannot be written, and for a pipe that nobody reads, which would never open.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
    with open(os.open(path, flags, 0o666), "ab", buffering=0) as file:
        os.set_blocking(file.fileno(), True)  # a reader may be slower than this
        size = file.tell() if file.seekable() else None
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            if size is not None:
                with contextlib.suppress(OSError):
                    file.truncate(size)
            raise


def check_output(path: str | os.PathLike[str]) -> None:
    """UserError where a file of this name cannot be written: to ask before long work begins."""
    path = os.fspath(path)
    if not path:
        raise UserError("an output has an empty name: give the name of a file")
    folder, name = os.path.split(path)
    if not name or os.path.isdir(path):
        raise UserError(f"{path} is a folder: give the name of a file in it")
    target = os.path.realpath(path)
    # A rename would put a file in the place of a device, such as /dev/null in a container.
    if os.path.lexists(target) and not os.path.isfile(target):
        raise UserError(f"{path} is a device, a pipe or a loop of links: give the name of a file")
    if os.path.islink(path):
        folder = os.path.dirname(target)
    if not os.path.isdir(folder or "."):
        raise UserError(f"{path}: there is no folder {folder}: make it, or choose another")
    if not os.access(folder or ".", os.W_OK | os.X_OK):
        raise UserError(f"{path}: the folder {folder or '.'} is not yours to write: choose another")


def check_replaced(path: str | os.PathLike[str], what: str, marks: Sequence[str]) -> None:
    """check_output, and that a file of this name is of the kind that takes its place.

    marks: words that stand in the first HEAD_BYTES of every such file. An empty file may go.
    """
    check_output(path)
    if os.path.exists(path) and os.path.getsize(path) and not has_marks(path, marks):
        raise UserError(f"{path} is another file, not {what}: give the name of a new file")


def has_marks(path: str | os.PathLike[str], marks: Sequence[str]) -> bool:
    """Whether these words stand in the first HEAD_BYTES of a file."""
    with open(path, "rb") as stream:
        head = stream.read(HEAD_BYTES)
    return all(mark.encode() in head for mark in marks)


def check_figure(path: str) -> None:
    """check_output, and that the name tells a format of FIGURES."""
    if os.path.splitext(path)[1].lower() not in FIGURES:
        raise UserError(f"a figure ends in {', '.join(FIGURES[:-1])} or {FIGURES[-1]}, got {path}")
    check_output(path)
