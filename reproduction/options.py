"""Options of the scripts, and where their files go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from reproduction.names import DISTRIBUTIONS, MODELS

ROOT = Path(__file__).resolve().parents[1]
SCALES = ("tiny", "full")


def choices(known: Sequence[str]):
    """A reader of comma-separated names among known."""

    def read(given: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in given.split(",") if name.strip())
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"choose among {', '.join(known)}, got {given!r:.60}")
        return names

    return read


def parser(description: str) -> argparse.ArgumentParser:
    """What every script takes."""
    made = argparse.ArgumentParser(description=description)
    how = made.add_mutually_exclusive_group()
    how.add_argument(
        "--simulate", action="store_true", help="the paper's scale without a GPU: simulated"
    )
    how.add_argument(
        "--scale", choices=SCALES, default="tiny", help="of a real run: 2 CPU cores, or 8 GPUs"
    )
    made.add_argument("--as-published", action="store_true", help="what the paper ran, not ours")
    made.add_argument("--models", type=choices(MODELS), default=MODELS, metavar="NAMES")
    made.add_argument(
        "--distributions", type=choices(DISTRIBUTIONS), default=DISTRIBUTIONS, metavar="NAMES"
    )
    made.add_argument("--output", type=Path, default=ROOT / "results", metavar="FOLDER")
    return made
