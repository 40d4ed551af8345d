"""Which documents of a global batch share a row: two ways, both up to a budget of tokens."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def like_lengths(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Neighbours in the order of their lengths, up to the budget: few kinds of rows, all even."""
    groups: list[list[int]] = []
    held = tokens
    for number in sorted(range(len(lengths)), key=lambda number: (lengths[number], number)):
        held += lengths[number]
        if held > tokens:
            groups.append([])
            held = lengths[number]
        groups[-1].append(number)
    return groups


def filled_up(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The longest first, each where the least room is left that holds it (best fit decreasing)."""
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # sorted: (room, group)
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[number]
        index = bisect.bisect_left(rooms, (length, 0))
        if index == len(rooms):
            groups.append([])
            room, group = tokens, len(groups) - 1
        else:
            room, group = rooms.pop(index)
        groups[group].append(number)
        if room > length:
            bisect.insort(rooms, (room - length, group))
    return groups
