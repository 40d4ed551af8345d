"""Faults of the commands that write files: killed, without room, given damaged input."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reliability_job import digest
from tests.report.samples import records, write_costs, write_trace

LIMIT_SECONDS = 200
SEED = 5


@dataclass(frozen=True)
class Command:
    """outputs: the files that it writes, relative to the folder."""

    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]


COMMANDS = {
    "report": Command(
        ("report", "trace.jsonl", "--costs", "costs.json", "-o", "page.html"),
        ("page.html",),
        ("trace.jsonl", "costs.json"),
    ),
    "fit": Command(("fit", "table.json", "-o", "fitted.json"), ("fitted.json",), ("table.json",)),
    "data prepare": Command(
        ("data", "prepare", "texts.jsonl", "-o", "corpus", "--overwrite"),
        ("corpus.bin", "corpus.idx", "corpus.json"),
        ("texts.jsonl",),
    ),
    "plan": Command(("plan", "costs.json", "--lengths", "128,1K"), (), ("costs.json",)),
    "data lengths": Command(("data", "lengths", "good"), (), ("good.idx", "good.json")),
    "train": Command(("train", "run.yaml", "--dry-run"), (), ("run.yaml",)),
}
RUN = "nproc_per_node: 2\nmegatron: {num-layers: 2}\nparadyse: {policy: optimal, order: bucketed}\n"


class Commands:
    """Runs each command in a fork of this process, which has imported what they need."""

    def __init__(self, folder: Path):
        import matplotlib.pyplot  # noqa: F401
        import xgboost  # noqa: F401

        from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file

        self.folder = folder
        folder.mkdir(parents=True)
        write_costs(folder / "costs.json")
        write_cost_file(folder / "table.json", read_cost_file(folder / "costs.json").table)
        write_trace(folder / "trace.jsonl", records(40))
        texts = (json.dumps({"text": "def f(x): return x\n" * (i % 90 + 1)}) for i in range(3000))
        (folder / "texts.jsonl").write_text("\n".join(texts) + "\n")
        (folder / "run.yaml").write_text(RUN)
        self.seconds: dict[str, float] = {}
        self.wholes: dict[str, set[tuple[str, ...]]] = {}
        for name in COMMANDS:
            if name == "data lengths":
                for suffix in (".bin", ".idx", ".json"):
                    shutil.copy(folder / f"corpus{suffix}", folder / f"good{suffix}")
            code, seconds, said = self.run(name)
            assert code == 0, f"{name}: {said}"
            self.seconds[name] = seconds
            self.wholes[name] = {self.state(name)}

    def run(
        self, name: str, act: Callable[[], None] | None = None, kill_after: float | None = None
    ):
        """(exit code, None at the limit; seconds; what it said); act: in the child, before."""
        log = self.folder / "log"
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            self._become(name, act, log)
        code = None
        while code is None and time.monotonic() - began < LIMIT_SECONDS:
            if kill_after is not None and time.monotonic() - began > kill_after:
                os.kill(child, signal.SIGKILL)
            pid, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if pid else None
            time.sleep(0.002)
        if code is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return code, time.monotonic() - began, log.read_text(errors="replace")

    def _become(self, name: str, act: Callable[[], None] | None, log: Path) -> None:
        code = 70
        try:
            os.chdir(self.folder)
            descriptor = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            for number in (1, 2):
                os.dup2(descriptor, number)
            from megatron_paradyse.cli import cli

            if act is not None:
                act()
            cli(list(COMMANDS[name].arguments), prog_name="megatron-paradyse")
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def state(self, name: str) -> tuple[str, ...]:
        """Digests of the outputs; "" for one that is not there. Pages differ by their date."""
        paths = [self.folder / output for output in COMMANDS[name].outputs]
        return tuple(digest(path) if path.exists() else "" for path in paths)

    def is_whole(self, name: str) -> bool:
        """As it was, as a whole run leaves it, or absent."""
        state = self.state(name)
        if state in self.wholes[name] or not any(state):
            return True
        page = self.folder / "page.html"
        return name == "report" and page.read_text().rstrip().endswith("</html>")

    def faults(self, *, quick: bool) -> list[dict]:
        rows = []
        for kind, (count, inject) in COMMAND_KINDS.items():
            draw = random.Random(f"{SEED} {kind}")
            for number in range(1 if quick else count):
                rows.append({"kind": kind, **inject(self, draw, number)})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        return rows

    def row(self, name: str, ends: str, result, expected: Callable[[int], bool]) -> dict:
        code, seconds, said = result
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        problem = ""
        if code is not None and not expected(code):
            problem = f"{name}: code {code}: {said[-200:]}"
        elif code not in (0, -9, None) and len(errors) != 1:
            problem = f"{name}: {len(errors)} error lines: {said[-300:]}"
        elif "Traceback" in said:
            problem = f"{name}: a traceback"
        return {
            "ends": ends,
            "seconds": round(seconds, 2),
            "message": errors[0][:300] if errors else "",
            "hangs": name if code is None else "",
            "corruptions": "" if self.is_whole(name) else f"{name}: {self.state(name)}",
            "divergences": "",
            "unexplained": problem,
        }


WRITING = ("report", "fit", "data prepare")


def killed(commands: Commands, draw: random.Random, number: int) -> dict:
    name = WRITING[number % len(WRITING)]
    after = draw.uniform(0, commands.seconds[name])
    result = commands.run(name, kill_after=after)
    return commands.row(name, "killed", result, lambda code: code in (0, -9))


def no_room(commands: Commands, draw: random.Random, number: int) -> dict:
    name = WRITING[number % len(WRITING)]
    sizes = [(commands.folder / o).stat().st_size for o in COMMANDS[name].outputs]
    limit = draw.randrange(max(sizes))

    def act() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(limit, 2000), hard))

    return commands.row(name, "ends with one line", commands.run(name, act), lambda code: code != 0)


def damaged_input(commands: Commands, draw: random.Random, number: int) -> dict:
    """Cut off, or a few bytes overwritten: it is read as far as it is good, or refused."""
    name = list(COMMANDS)[number % len(COMMANDS)]
    path = commands.folder / draw.choice(COMMANDS[name].inputs)
    content = path.read_bytes()
    place = draw.randrange(len(content))
    new = content[:place]
    if draw.random() < 0.5:
        new += bytes(draw.randrange(256) for _ in range(4)) + content[place + 4 :]
    path.write_bytes(new)
    kept = {o: (commands.folder / o).read_bytes() for o in COMMANDS[name].outputs}
    result = commands.run(name)
    path.write_bytes(content)
    row = commands.row(
        name, "ends with one line, or reads it", result, lambda code: code in (0, 1, 2)
    )
    if result[0] == 0:
        row["corruptions"] = ""  # of another input it made another output
    for output, old in kept.items():
        (commands.folder / output).write_bytes(old)
    return row


def missing_folder(commands: Commands, draw: random.Random, number: int) -> dict:
    """A folder that takes no files: /proc, or a file where the folder should be."""
    name = WRITING[number % len(WRITING)]
    place = draw.choice(("/proc/x", "costs.json/x", "/dev/null/x"))

    def act() -> None:
        command = COMMANDS[name]
        arguments = list(command.arguments)
        output = arguments.index("-o") + 1
        arguments[output] = place + Path(arguments[output]).suffix
        COMMANDS[name] = Command(tuple(arguments), command.outputs, command.inputs)

    return commands.row(name, "ends with one line", commands.run(name, act), lambda code: code != 0)


Inject = Callable[[Commands, random.Random, int], dict]
COMMAND_KINDS: dict[str, tuple[int, Inject]] = {
    "command killed while it writes": (48, killed),
    "full disk under a command": (30, no_room),
    "output of a command that cannot be written": (18, missing_folder),
    "damaged input of a command": (66, damaged_input),
}
