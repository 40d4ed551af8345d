"""The one error that users are meant to read."""


class UserError(ValueError):
    """Something that the user gave cannot be run. One line: the rule, the value, the remedy."""
