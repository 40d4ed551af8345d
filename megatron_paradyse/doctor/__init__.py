"""What this machine has for training, and what each lack costs."""

from __future__ import annotations

from dataclasses import dataclass

OK, LACK, FAULT, SKIP = "ok", "lack", "fault", "skip"


@dataclass(frozen=True)
class Check:
    """state: "ok"; "lack", training runs without it; "fault", it does not; "skip", not checked.

    cost: what the lack means; remedy: the command that mends it.
    """

    name: str
    state: str
    found: str
    cost: str = ""
    remedy: str = ""
