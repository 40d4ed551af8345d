"""The one error that users are meant to read, and the line in which ranks say it."""

import os
import re
from collections.abc import Iterable

_LINE = re.compile(r"error(?: \(rank \d+\))?: (.*)")


class UserError(ValueError):
    """Something that the user gave cannot be run. One line: the rule, the value, the remedy."""


def say_error(message: str, *, rank: int = 0) -> None:
    """One line on stderr itself: torch.distributed redirects sys.stderr.

    Bytes of a file's name that are no text are escaped.
    """
    name = f" (rank {rank})" if rank else ""
    os.write(2, f"error{name}: {message}\n".encode(errors="backslashreplace"))


def errors_said(lines: Iterable[str]) -> list[str]:
    """Of what a process said, the messages of such lines."""
    return [match[1] for match in map(_LINE.match, lines) if match is not None]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "did you mean KNOWN? " where one is near, else ""."""
    import difflib

    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}? " if near else ""
