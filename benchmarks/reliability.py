"""Breaks trainings and commands as an operator's day does, and looks at what comes of it.

Each fault of a training hits a small one on 2 CPU ranks (2 layers, h = 32, dropout, a plan of four
strategies) that goes on from the checkpoints that earlier faults left: every loss must be that of
one undisturbed run, so that each run also proves the last fault's checkpoint. A hang is a rank that
has not ended within the limit; a corruption is a file (checkpoint, costs, trace, data, report) that
is neither whole nor refused; a divergence is a loss that differs from the undisturbed run's by more
than 1e-6.

    .venv/bin/python benchmarks/reliability.py --json
"""

from __future__ import annotations

import concurrent.futures
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, options
from benchmarks.reliability_collectives import faults
from benchmarks.reliability_commands import Commands
from benchmarks.reliability_faults import ENDS, GOES_ON, KINDS, NOBODY_LEFT, Case
from benchmarks.reliability_job import (
    EQUAL,
    LAST,
    LIMIT_SECONDS,
    RANKS,
    WATCHDOG_SECONDS,
    Job,
    Outcome,
)

QUICK_KINDS = ("kill -9 of a rank in save", "truncated checkpoint", "ranks with other flags")
SEED = 11
BUDGET_SECONDS = 25 * 60  # of the trainings' faults; the rest of them is then left out


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as name,
        concurrent.futures.ProcessPoolExecutor(2) as pool,
    ):
        commands = pool.submit(of_commands, Path(name) / "commands", arguments.quick)
        bare = pool.submit(faults, Path(name) / "bare", quick=arguments.quick)
        rows = trainings(Path(name), quick=arguments.quick, deadline=began + BUDGET_SECONDS)
        rows += commands.result() + bare.result()
        rows = without_places(rows, name)
    summary = summarised(rows)
    for kind, row in summary.items():
        print(json.dumps({"kind": kind, **row}))
    result = {
        "faults": len(rows),
        "kinds": len(summary),
        **{key: sum(bool(row[key]) for row in rows) for key in BAD},
        "seconds": round(time.monotonic() - began, 1),
        "by_kind": summary,
        "bad": [row for row in rows if any(row[key] for key in BAD)],
    }
    configuration = {
        "ranks": RANKS,
        "watchdog_seconds": WATCHDOG_SECONDS,
        "limit_seconds": LIMIT_SECONDS,
        "seed": SEED,
    }
    finish("reliability", result, configuration, arguments)


def without_places(rows: list[dict], folder: str) -> list[dict]:
    """The rows without where this machine keeps the benchmark's files and its Python."""
    text = json.dumps(rows).replace(folder, "FOLDER").replace(f"{sys.prefix}/", "")
    return json.loads(text)


def of_commands(folder: Path, quick: bool) -> list[dict]:
    """In a process of its own, beside the trainings."""
    return Commands(folder).faults(quick=quick)


BAD = ("hangs", "corruptions", "divergences", "unexplained")


def summarised(rows: list[dict]) -> dict[str, dict]:
    """By kind: how many, what was bad, the longest time and one message."""
    found: dict[str, dict] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        endings = Counter(row["ends"] for row in of_kind)
        found[kind] = {
            "faults": len(of_kind),
            **{key: sum(bool(row[key]) for row in of_kind) for key in BAD},
            "ends": dict(endings),
            "seconds_max": max(row["seconds"] for row in of_kind),
            "message": next((row["message"] for row in of_kind if row["message"]), ""),
        }
    return found


def trainings(folder: Path, *, quick: bool, deadline: float) -> list[dict]:
    """One fault of each kind, then another, on one job for each way to choose plans."""
    draw = random.Random(SEED)
    jobs = {by_cost: Job(folder / f"job-{by_cost}", by_cost=by_cost) for by_cost in (False, True)}
    rows = []
    for kind, make, by_cost in in_turn(quick):
        if time.monotonic() > deadline:
            break
        job = jobs[by_cost]
        if not job.reference:
            job.learn_reference(30 if quick or by_cost else LAST)
        prepare(job)
        rows.append({"kind": kind, **one(job, make(draw, job))})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    for job in jobs.values():
        if job.reference:  # what the last fault left is good too
            last = job.run({"fault": "none"}, until=job.iteration() + 4)
            if last.codes != [0] * RANKS or job.diverges(last) > EQUAL:
                rows[-1]["corruptions"] = f"nothing goes on from it: {last.stderr[-300:]}"
    return rows


def in_turn(quick: bool):
    """(kind, what makes a fault of it, whether plans are by cost), so that time cuts all alike."""
    if quick:
        yield from ((kind, *KINDS[kind][1:]) for kind in QUICK_KINDS)
        return
    for turn in range(max(count for count, _, _ in KINDS.values())):
        yield from ((k, make, by_cost) for k, (n, make, by_cost) in KINDS.items() if turn < n)


def prepare(job: Job) -> None:
    """A job has two checkpoints at least, and iterations of the undisturbed run before it."""
    if job.iteration() > len(job.reference) - 14:
        job.anew()
    if job.iteration() < 8:
        outcome = job.run({"fault": "none"}, until=8)
        assert outcome.codes == [0] * RANKS, outcome.stderr[-3000:]


def one(job: Job, case: Case) -> dict:
    """Inject a fault and say what was wrong with its end."""
    until = job.iteration() + case.more_iterations
    outcome = job.run(case.spec, *case.flags, until=until, saves=case.saves)
    stopped = [case.spec["rank"]] if case.spec["fault"].startswith("stop") else []
    hung = [r for r, code in enumerate(outcome.codes) if code is None and r not in stopped]
    corruption = case.after(outcome) or job.trace_problem()
    difference = job.diverges(outcome)
    return {
        "ends": case.expect,
        "seconds": round(outcome.seconds, 1),
        "message": said(outcome, case),
        "hangs": f"ranks {hung}" if hung else "",
        "corruptions": corruption or "",
        "divergences": f"{difference:g}" if difference > EQUAL else "",
        "unexplained": unexplained(outcome, case),
        "iterations": len(outcome.losses),
    }


def said(outcome: Outcome, case: Case) -> str:
    lines = outcome.errors if case.expect == ENDS else outcome.news
    found = [line for line in lines if re.search(case.message, line)] if case.message else []
    return (found or outcome.errors or [""])[0][:400]


def unexplained(outcome: Outcome, case: Case) -> str:
    """What its words or codes lack."""
    left = [code for code in outcome.codes if code not in (-9, None)]
    if case.expect == NOBODY_LEFT:
        return "" if not left else f"codes {outcome.codes}"
    if case.expect == GOES_ON:
        if outcome.codes != [0] * RANKS:
            return f"it did not go on: {outcome.codes}: {outcome.stderr[-300:]}"
        lacks = case.message and not re.search(case.message, "\n".join(outcome.news))
        return f"no news of it: {outcome.news[:3]}" if lacks else ""
    if any(code == 0 for code in left):
        return f"codes {outcome.codes}"
    if len(outcome.errors) != 1:
        return f"{len(outcome.errors)} error lines: {outcome.errors[:2]} {outcome.stderr[-400:]}"
    if not re.search(case.message, outcome.errors[0]):
        return f"another message: {outcome.errors[0][:300]}"
    return "a traceback" if "Traceback" in outcome.stderr else ""


if __name__ == "__main__":
    main()
