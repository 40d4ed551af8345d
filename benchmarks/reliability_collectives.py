"""Faults of ranks that only wait for each other: no model, so that many fit into little time."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from pathlib import Path

from tests.train.harness import run_each

RANKS = 3
WATCHDOG_SECONDS = 1
LIMIT_SECONDS = 60
SEED = 23
# kind -> (how many, module, its fault, what the line must say; None: training goes on)
BARE = "tests.train.watched"
ALONE = "tests.train.agreeing"
KINDS = {
    "kill -9 of a rank in a bare collective": (24, BARE, "kill", "its process has ended"),
    "rank stopped in a bare collective": (12, BARE, "stop", "stopped for"),
    "slow rank in a bare collective": (6, BARE, "slow", None),
    "rank that ends with an error": (8, BARE, "error", "this file is wrong"),
    "rank that never starts": (6, ALONE, "late", "no word of ranks"),
    "ranks with another plan file": (6, ALONE, "plan", "the plan file is"),
}


def faults(folder: Path, *, quick: bool) -> list[dict]:
    """In turn over the kinds."""
    draw, rows = random.Random(SEED), []
    for turn in range(1 if quick else max(count for count, *_ in KINDS.values())):
        for kind, (count, module, fault, message) in KINDS.items():
            if turn < count:
                rows.append({"kind": kind, **one(folder, module, fault, message, draw)})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def one(folder: Path, module: str, fault: str, message: str | None, draw: random.Random) -> dict:
    rank = draw.randrange(RANKS)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(RANKS):
        name = "metp" if (fault, number) == ("plan", rank) else "megatron_ts"
        (folder / f"plan-{number}").write_text(f"default: {name}\n")
    argv = [str(WATCHDOG_SECONDS), fault, str(rank)]
    if module == ALONE:
        rank = rank or 1  # the first rank waits for the others
        argv = [fault, str(rank), str(folder)]
    began = time.monotonic()
    codes, _, stderr = run_each(
        module, argv, ranks=RANKS, folder=folder / "logs", timeout_seconds=LIMIT_SECONDS
    )
    lines = [line for line in stderr.splitlines() if line.startswith("error")]
    errors = list(dict.fromkeys(re.sub(r"^error \(rank \d+\)", "error", line) for line in lines))
    hung = [r for r, code in enumerate(codes) if code is None and (fault, r) != ("stop", rank)]
    problem = ""
    if message is None and codes != [0] * RANKS:
        problem = f"codes {codes}: {stderr[-200:]}"
    elif message is not None and (len(errors) != 1 or message not in errors[0]):
        problem = f"{len(errors)} lines: {errors[:2]} {stderr[-200:]}"
    elif message is not None and 0 in [c for r, c in enumerate(codes) if r != rank]:
        problem = f"codes {codes}"
    news = [line for line in stderr.splitlines() if line.startswith("> paradyse: rank")]
    return {
        "ends": "goes on" if message is None else "ends with one line",
        "seconds": round(time.monotonic() - began, 1),
        "message": (errors or news or [""])[0][:400],
        "hangs": f"ranks {hung}" if hung else "",
        "corruptions": "",
        "divergences": "",
        "unexplained": problem,
    }
