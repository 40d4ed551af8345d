"""Faults of a training: what is done, and what must come of it."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reliability_job import RANKS, SAVE_INTERVAL, WATCHDOG_SECONDS, Job, Outcome
from tests.train.synthetic_costs import write_costs

ENDS, GOES_ON, NOBODY_LEFT = "ends with one line", "goes on", "all ranks are killed"


@dataclass
class Case:
    """expect: how it must end; message: what the line, or the news, must match.

    after: mends what prepare broke, so that the next run can go on; its own check, if it returns a
    text, is a corruption.
    """

    spec: dict
    expect: str
    message: str = ""
    flags: Sequence[object] = ()
    more_iterations: int = 2 * SAVE_INTERVAL
    saves: bool = False  # starting the helpers of a save takes most of a run's time
    after: Callable[[Outcome], str | None] = lambda outcome: None


Make = Callable[[random.Random, Job], Case]


def at(job: Job, draw: random.Random, *, save: bool = False) -> int:
    """An iteration of the next run: where it saves, or one in which it has begun."""
    start = job.iteration()
    return start + SAVE_INTERVAL if save else start + draw.randint(2, SAVE_INTERVAL + 2)


def killed(where: str) -> Make:
    def make(draw: random.Random, job: Job) -> Case:
        rank = draw.randrange(RANKS)
        spec = {"fault": f"kill in {where}", "rank": rank, "delay": delay(draw, where)}
        spec["iteration"] = at(job, draw, save=where == "save")
        message = rf"rank {rank} of {RANKS} is missing: its process has ended"
        return Case(spec, ENDS, message, saves=where == "save")

    return make


def delay(draw: random.Random, where: str) -> float:
    return draw.uniform(0, 0.4 if where == "save" else 0.02)


def all_killed(where: str) -> Make:
    def make(draw: random.Random, job: Job) -> Case:
        name = "kill of all ranks" + (" in save" if where == "save" else "")
        spec = {"fault": name, "rank": "all", "delay": delay(draw, where)}
        spec["iteration"] = at(job, draw, save=where == "save")
        return Case(spec, NOBODY_LEFT, saves=where == "save")

    return make


def stopped(draw: random.Random, job: Job) -> Case:
    where = draw.choice(("forward", "backward", "save"))
    rank = draw.randrange(RANKS)
    spec = {"fault": f"stop in {where}", "rank": rank, "delay": delay(draw, where)}
    spec["iteration"] = at(job, draw, save=where == "save")
    message = rf"rank {rank} of {RANKS} is missing: stopped for \d+ s"
    return Case(spec, ENDS, message, saves=where == "save")


def killed_in_profile(draw: random.Random, job: Job) -> Case:
    """What was measured before stays, and what was not is not told to be impossible."""
    rank, output = draw.randrange(RANKS), job.folder / "profile.json"
    output.unlink(missing_ok=True)
    values = {"output": str(output), "lengths": [16, 32, 64], "quick": True}
    values |= {"strategies": ["megatron_ts", "metp"], "seconds_per_point": 0.05}
    spec = {"fault": "kill in profile", "rank": rank, "delay": draw.uniform(0, 1.5)}

    def after(outcome: Outcome) -> str | None:
        from megatron_paradyse.costs.cost_file import read_cost_file

        if not output.exists():
            return None
        wrong = [m for m in read_cost_file(output).table.measurements if m.status != "ok"]
        return f"{len(wrong)} points are {wrong[0].status}" if wrong else None

    message = rf"rank {rank} of {RANKS} is missing: its process has ended"
    return Case(spec | {"profile": values}, ENDS, message, after=after)


def slow(draw: random.Random, job: Job) -> Case:
    rank = draw.randrange(RANKS)
    spec = {"fault": "slow rank", "rank": rank, "delay": 0.9 * WATCHDOG_SECONDS}
    spec["iteration"] = at(job, draw)
    return Case(spec, GOES_ON, rf"has waited \d+ s in .* for rank {rank}, which is in")


def not_a_number(draw: random.Random, job: Job) -> Case:
    """Megatron saves what it has, for a second look on another machine, unless that is off."""
    rank, iteration = draw.randrange(RANKS), at(job, draw)
    spec = {"fault": "NaN loss", "rank": rank, "iteration": iteration}

    def after(outcome: Outcome) -> None:
        good = [p for p in job.checkpoints.glob("iter_*") if int(p.name[5:]) < iteration - 1]
        for path in set(job.checkpoints.glob("iter_*")) - set(good):
            shutil.rmtree(path)
        last = max(int(path.name[5:]) for path in good)
        (job.checkpoints / "latest_checkpointed_iteration.txt").write_text(str(last))

    messages = {
        "disabled": f"the loss is not a number at iteration {iteration}",
        "validate_results": f"a loss of iteration {iteration} was not a number",
    }
    mode = draw.choice(tuple(messages))
    return Case(spec, ENDS, messages[mode], ["--rerun-mode", mode], saves=True, after=after)


def full_disk(draw: random.Random, job: Job) -> Case:
    spec = {"fault": "full disk in save", "rank": draw.choice((*range(RANKS), "all"))}
    spec |= {"iteration": at(job, draw, save=True), "bytes": draw.randrange(48_000, 90_000)}
    message = r"the checkpoint of iteration \d+ cannot be written to .*"
    return Case(spec, ENDS, message, saves=True)


def full_trace(draw: random.Random, job: Job) -> Case:
    return Case(
        {"fault": "none"},
        ENDS,
        "--paradyse-trace .*: No space left",
        ["--paradyse-trace", "/dev/full"],
    )


def no_folder(draw: random.Random, job: Job) -> Case:
    """What should be a folder is a file, or lies in a file system that takes none."""
    if draw.random() < 0.5:
        flags = ["--paradyse-trace", draw.choice((job.costs / "trace", "/proc/trace"))]
        return Case({"fault": "none"}, ENDS, "--paradyse-trace .*: give a file that", flags)
    flags = ["--save", draw.choice((job.costs, job.costs / "x", "/proc/checkpoints"))]
    message = "the checkpoint of iteration .* cannot be written"
    return Case({"fault": "none"}, ENDS, message, flags, saves=True)


def no_data(draw: random.Random, job: Job) -> Case:
    suffix = draw.choice((".idx", ".bin"))
    path = job.folder / f"corpus{suffix}"
    kept = path.rename(path.with_name("kept"))

    def after(outcome: Outcome) -> None:
        kept.rename(path)

    return Case({"fault": "none"}, ENDS, rf"data file .*corpus{suffix} not found", after=after)


def put_back(path: Path, content: bytes) -> Callable[[Outcome], None]:
    """What comes after a fault: the file as it was."""

    def after(outcome: Outcome) -> None:
        path.write_bytes(content)

    return after


def damaged_data(draw: random.Random, job: Job) -> Case:
    """A file of data is cut off, or its head is overwritten."""
    path = job.folder / f"corpus{draw.choice(('.idx', '.bin'))}"
    content = path.read_bytes()
    cut = content[: draw.randrange(len(content) - 1)]
    path.write_bytes(
        cut if draw.random() < 0.6 or path.suffix == ".bin" else os.urandom(40) + content[40:]
    )

    return Case({"fault": "none"}, ENDS, r"corpus\.(idx|bin)", after=put_back(path, content))


def data_vanishes(draw: random.Random, job: Job) -> Case:
    path = job.folder / f"corpus{draw.choice(('.idx', '.bin'))}"
    content = path.read_bytes()
    spec = {"fault": "data file vanished while running", "rank": 0, "path": str(path)}
    spec |= {"content": None, "iteration": at(job, draw)}
    return Case(spec, GOES_ON, after=put_back(path, content))


def costs_replaced(draw: random.Random, job: Job) -> Case:
    content = job.costs.read_bytes()
    new = draw.choice(("{}", "no costs", content.decode()[: draw.randrange(len(content))]))
    spec = {"fault": "cost file replaced while running", "rank": 0, "path": str(job.costs)}
    spec |= {"content": new, "iteration": at(job, draw)}
    return Case(spec, GOES_ON, after=put_back(job.costs, content))


def bad_costs(draw: random.Random, job: Job) -> Case:
    content = job.costs.read_bytes()
    place = draw.randrange(len(content) - 2)
    broken = content[:place] if draw.random() < 0.5 else content[:place] + b"\x00" + content[place:]
    job.costs.write_bytes(broken)

    return Case({"fault": "none"}, ENDS, r"costs\.json", after=put_back(job.costs, content))


def truncated_checkpoint(draw: random.Random, job: Job) -> Case:
    """Any file of the newest checkpoint is cut off; then the one before must do."""
    iteration = job.iteration()
    folder = job.checkpoints / f"iter_{iteration:07d}"
    path = draw.choice([p for p in sorted(folder.iterdir()) if p.stat().st_size > 1])
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content) - 1)])

    name = re.escape(path.name)
    return Case(
        {"fault": "none"}, ENDS, rf"is not whole: .*{name}.*", after=put_back(path, content)
    )


def cut_tracker(draw: random.Random, job: Job) -> Case:
    """A save of Megatron's was killed while it wrote the name of the newest checkpoint."""
    path = job.checkpoints / "latest_checkpointed_iteration.txt"
    path.write_text("")
    return Case({"fault": "none"}, GOES_ON, "was cut off: loading iteration")


def half_a_save(draw: random.Random, job: Job) -> Case:
    """The folder of a checkpoint that was never finished lies beside the good ones."""
    iteration = job.iteration()
    good, half = (job.checkpoints / f"iter_{n:07d}" for n in (iteration, iteration + 1000))
    shutil.copytree(good, half)
    for path in [p for p in half.iterdir() if draw.random() < 0.5]:
        path.unlink()

    def after(outcome: Outcome) -> None:
        shutil.rmtree(half)

    return Case({"fault": "none"}, GOES_ON, after=after)


def other_flags(draw: random.Random, job: Job) -> Case:
    name, value = draw.choice(
        [("--lr", "2e-3"), ("--seed", "77"), ("--paradyse-order", "bucketed"), ("--clip-grad", "2")]
    )
    rank = draw.randrange(RANKS)
    spec = {"fault": "other flags on a rank", "rank": rank, "flags": [name, value]}
    return Case(spec, ENDS, rf"rank \d of {RANKS} would compute something else: {name} is ")


def other_costs(draw: random.Random, job: Job) -> Case:
    other = write_costs(job.folder / "other.json", scale_seconds=draw.uniform(0.5, 0.9))
    spec = {"fault": "other cost file on a rank", "rank": draw.randrange(RANKS)}
    spec["flags"] = ["--paradyse-cost-model", str(other)]
    return Case(spec, ENDS, "would compute something else: the cost file is")


def other_code(draw: random.Random, job: Job) -> Case:
    spec = {"fault": "other code on a rank", "rank": draw.randrange(RANKS)}
    return Case(spec, ENDS, "would compute something else: the code of megatron_paradyse is")


def other_plans(draw: random.Random, job: Job) -> Case:
    spec = {"fault": "other plans on a rank", "rank": draw.randrange(RANKS)}
    spec["iteration"] = at(job, draw)
    return Case(spec, ENDS, "plans differ at iteration", ["--paradyse-verify-plans"])


# kind -> (how many in a full run, what makes one, whether plans are chosen by cost)
KINDS: dict[str, tuple[int, Make, bool]] = {
    "kill -9 of a rank in forward": (12, killed("forward"), False),
    "kill -9 of a rank in backward": (12, killed("backward"), False),
    "kill -9 of a rank in save": (14, killed("save"), False),
    "kill -9 of all ranks": (6, all_killed("step"), False),
    "kill -9 of all ranks in save": (8, all_killed("save"), False),
    "rank stopped (SIGSTOP)": (5, stopped, False),
    "kill -9 of a rank in profile": (5, killed_in_profile, False),
    "slow rank": (3, slow, False),
    "NaN loss": (4, not_a_number, False),
    "full disk in save": (6, full_disk, False),
    "full disk under the trace": (2, full_trace, False),
    "output folder that cannot be written": (4, no_folder, False),
    "vanished data file": (2, no_data, False),
    "damaged data file": (4, damaged_data, False),
    "data file vanished while running": (3, data_vanishes, False),
    "cost file replaced while running": (4, costs_replaced, True),
    "damaged cost file": (3, bad_costs, True),
    "truncated checkpoint": (6, truncated_checkpoint, False),
    "tracker of checkpoints cut off": (3, cut_tracker, False),
    "unfinished checkpoint beside good ones": (2, half_a_save, False),
    "ranks with other flags": (4, other_flags, False),
    "ranks with another cost file": (2, other_costs, True),
    "ranks with other code": (2, other_code, False),
    "ranks with other plans": (2, other_plans, False),
}
