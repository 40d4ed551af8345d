"""How the ranks agree on what became of a point, one rank's failure included.

A failure that all ranks meet alike (an unsupported shape, the same allocation too many) leaves them
where they can talk. A failure of one rank leaves the others inside a collective that it will never
join: it then waits here in vain, leaves a note beside the output, and ends its process with
RESTART_CODE. So do all where several failed, but not at the same collective: what one has begun
there would meet the next that another begins. Whoever started the ranks ends the others and starts
all again; the note becomes the point's status, and the profile goes on behind it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_paradyse.costs.table import OK, OOM, UNSUPPORTED
from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies.transport import num_begun
from megatron_paradyse.train.ending import is_out_of_memory
from megatron_paradyse.whole_file import temporary_path

RESTART_CODE = 75
WAIT_SECONDS = 120.0


class OneRankFailedError(Exception):
    """The other ranks did not come to agree, or ranks failed at different collectives."""


def status_alone(error: OneRankFailedError) -> str:
    """What a rank that came to agree alone says of the point: its own status, which is not "ok"."""
    mine = str(error)
    return f"{UNSUPPORTED}another rank did not come to the end of it" if mine == OK else mine


class Agreement:
    """A group of all ranks for words only, so that it never meets an operation's collectives."""

    def __init__(self, *, wait_seconds: float = WAIT_SECONDS, groups: Sequence[Any] = ()):
        """groups: of this rank, in which operations communicate."""
        self._groups = groups
        timeout = datetime.timedelta(seconds=wait_seconds)
        self._group: Any = torch.distributed.new_group(backend="gloo", timeout=timeout)

    def status(self, mine: str) -> str:
        """The worst of all ranks: "oom" before "unsupported: why" before "ok".

        Ask before anything waits for a GPU, on which a collective may wait for other ranks.
        """
        begun = {group.group_name: num_begun(group) for group in self._groups}
        try:
            everyone = self.everyone([mine, begun])
        except RuntimeError as error:
            raise OneRankFailedError(mine) from error
        worst = max((status for status, _ in everyone), key=lambda x: (x == OOM, x != OK))
        places = {place for _, begun in everyone for place in begun.items()}
        if worst != OK and len(places) > len({group for group, _ in places}):
            raise OneRankFailedError(worst)
        return worst

    def first(self, value):
        """Rank 0's value, of what JSON can say."""
        return self.everyone(value)[0]

    def everyone(self, value) -> list:
        """Every rank's value, by rank: as JSON, since what a pickle holds would be run."""
        content = json.dumps(value).encode()
        sizes = self._gathered(torch.tensor([len(content)]))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        parts = self._gathered(padded)
        return [
            json.loads(bytes(part[: int(size)].tolist()))
            for part, size in zip(parts, sizes, strict=True)
        ]

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        torch.distributed.all_gather(everyone, mine, group=self._group)
        return everyone


def status_of(error: BaseException) -> str:
    """What an exception of an operation says about the point."""
    if is_out_of_memory(error):
        return OOM
    why = " ".join(str(error).split())
    if not isinstance(error, UserError):
        why = f"{type(error).__name__}: {why}"
    printable = "".join(c for c in why if c.isprintable())
    return (UNSUPPORTED + printable)[:400]


def note_path(output: Path) -> Path:
    return output.with_name(output.name + ".failed")


def leave_note(output: Path, key: tuple, status: str) -> None:
    """The first to speak is right: others fail later, because it has closed its sockets."""
    path = note_path(output)
    partial = Path(temporary_path(path))
    partial.write_text(json.dumps({"point": key, "status": status}))
    with contextlib.suppress(FileExistsError):
        os.link(partial, path)
    partial.unlink()


def take_note(output: Path) -> tuple[tuple, str] | None:
    """The point that ended the previous run, and its status; the note is removed."""
    path = note_path(output)
    try:
        note = json.loads(path.read_text())
        found = tuple(note["point"]), str(note["status"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        found = None
    path.unlink(missing_ok=True)
    return found
