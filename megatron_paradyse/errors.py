"""The one error that users are meant to read."""

from collections.abc import Iterable


class UserError(ValueError):
    """Something that the user gave cannot be run. One line: the rule, the value, the remedy."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "did you mean KNOWN? " where one is near, else ""."""
    import difflib

    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}? " if near else ""
