"""Runs one input through a target and says what was wrong: at most one sentence."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from megatron_paradyse.errors import UserError
from tests.fuzz.targets import Target

MAX_SECONDS = 2.0
MAX_MORE_BYTES = 1 << 30  # of address space, over what the imports took
FORBIDDEN = (
    "pickle.",
    "socket.",
    "subprocess.",
    "os.exec",
    "os.system",
    "os.fork",
    "ctypes.dlopen",
)
FORBIDDEN += ("os.remove", "os.rename", "os.rmdir", "shutil.", "exec.untrusted")
_watching: list[str] = []  # what was done that must not be, while a parser runs
_folders: list[str] = []  # where the parser that runs may write


def _audit(event: str, arguments: tuple) -> None:
    if not _folders:
        return
    if event.startswith(FORBIDDEN) and not _is_own(arguments):
        _watching.append(f"{event} {str(arguments)[:100]}")
    elif event == "open" and _writes(arguments) and not _is_own(arguments):
        _watching.append(f"opens {arguments[0]!r} to write")


def _writes(arguments: tuple) -> bool:
    path, mode = arguments[:2]
    return isinstance(path, str) and isinstance(mode, str) and any(c in mode for c in "wax+")


def _is_own(arguments: tuple) -> bool:
    """Whether a call names a file of the folder."""
    return bool(arguments) and str(arguments[0]).startswith(_folders[0])


def guard() -> None:
    """Once in a process: watch what parsers do, and bound their memory."""
    sys.addaudithook(_audit)
    with open("/proc/self/statm") as stream:
        taken = int(stream.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MAX_MORE_BYTES, resource.RLIM_INFINITY))


@contextlib.contextmanager
def _watched(folder: Path) -> Iterator[None]:
    _watching.clear()
    _folders.append(str(folder))
    try:
        yield
    finally:
        _folders.clear()


def finding(target: Target, folder: Path, content: bytes) -> str | None:
    """What is wrong with how a target takes an input: None where nothing is."""
    start = time.perf_counter()
    problem = None
    with _watched(folder):
        try:
            target.parse(folder, content)
        except UserError as error:
            problem = _wrong_message(str(error))
        except Exception as error:
            problem = f"{type(error).__name__} at {_place(error)}: {str(error)[:100]}"
    seconds = time.perf_counter() - start
    if problem is None and _watching:
        problem = f"{_watching[0]}"
    if problem is None and seconds > MAX_SECONDS:
        problem = f"took {seconds:.1f} s"
    return problem


def _wrong_message(message: str) -> str | None:
    if len(message) > 4000:
        return f"a message of {len(message)} characters: {message[:80]}"
    return None if message.strip() else "an empty message"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "megatron_paradyse/" in f.filename] or frames
    return f"{own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno}"
