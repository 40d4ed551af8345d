"""Sentences on differences, by hand: true for the numbers in results/ that are committed."""

from __future__ import annotations

HEADLINES = ""
CHECK = ""
CROSSOVERS = ""
TABLE5 = ""
CONTRIBUTIONS = ""
CASE_STUDY = ""
RESTARTS = ""
TABLE3 = ""
PEER = ""
OPEN: tuple[str, ...] = ()
SENTENCES: dict[str, str] = {}


def sentence(key: str) -> str:
    """Of one row; empty where the paper gives no figure to differ from."""
    return SENTENCES.get(key, "")
