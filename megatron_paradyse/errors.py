"""The one error that users are meant to read."""


class UserError(ValueError):
    """Something the user gave cannot be run; the message is one line: the rule, the value, the remedy."""
