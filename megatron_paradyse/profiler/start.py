"""Ranks that measure, started on this machine as torchrun would, and how far they are."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from megatron_paradyse.errors import UserError, errors_said, say_error
from megatron_paradyse.ports import free_port, without_torchrun
from megatron_paradyse.profiler.agree import RESTART_CODE, note_path
from megatron_paradyse.train.ending import current_watchdog, words_of
from megatron_paradyse.train.uncaught import report_once

PROGRESS_FD = "MEGATRON_PARADYSE_PROGRESS_FD"
MAX_RESTARTS = 100


def launched() -> bool:
    """Whether this process is one of the ranks: torchrun's, or those that start_ranks started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ranks_there(nproc: int | None) -> int:
    """How many ranks measure: those of a launcher, or the nproc to be started here; 0: no one says.

    UserError where both are told and differ: variables of a launcher also outlive it, and some
    schedulers give every node those of one rank.
    """
    if not launched():
        return nproc or 0
    rank, told = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if nproc is not None and told != str(nproc):
        raise UserError(
            f"--nproc {nproc} starts ranks here, and by RANK={rank} and "
            f"WORLD_SIZE={told} a launcher has started this process as one: unset both, or leave "
            "--nproc out"
        )
    return int(told)


def start_ranks(argv: Sequence[str], *, ranks: int, output: Path) -> None:
    """Run `megatron-paradyse` with argv on every rank, again where a rank failed alone.

    What they say goes into a file beside output.
    """
    note_path(output).unlink(missing_ok=True)
    log = output.with_name(output.name + ".log")
    with Display() as display:
        for _ in range(MAX_RESTARTS):
            code = _run(argv, ranks, log, display)
            if code != RESTART_CODE:
                break
    if code:
        raise UserError(f"{_reason(log)} (exit code {code}; all that the ranks said is in {log})")


def _run(argv: Sequence[str], ranks: int, log: Path, display: Display) -> int:
    """The first code other than 0 that a rank ends with, or 0; every rank has ended."""
    port = free_port()
    reading, writing = os.pipe()
    processes = []
    try:
        with log.open("w") as said:
            for rank in range(ranks):
                environment = {
                    **without_torchrun(),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                    PROGRESS_FD: str(writing),
                }
                command = [sys.executable, "-m", "megatron_paradyse", *argv]
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=said, stderr=said, pass_fds=[writing]
                    )
                )
        os.close(writing)
        with open(reading) as events:
            for line in events:
                display.show(json.loads(line))
        return _wait(processes)
    finally:
        for process in processes:  # all before the first is waited for: a signal may come again
            process.kill()
        for process in processes:
            process.wait()


def _wait(processes: list[subprocess.Popen]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return RESTART_CODE if RESTART_CODE in failed else failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _reason(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "a rank ended")
    return next(iter(errors_said(lines)), last)


def as_rank(
    work: Callable[[Callable[[dict], None]], None], tell: Callable[[], None] | None = None
) -> NoReturn:
    """work(report) as one of the ranks, of which the first reports events; never returns.

    tell: what comes of it, where start_ranks did not start them and nobody else does. Whatever ends
    it ends the process at once, for others may wait.
    """
    rank = int(os.environ["RANK"])
    descriptor = os.environ.get(PROGRESS_FD)
    display = Display()

    def report(event: dict) -> None:
        if rank != 0:
            return
        if descriptor is None:
            display.show(event)
        else:
            os.write(int(descriptor), (json.dumps(event) + "\n").encode())

    code, failed = 1, None  # in which words
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere if descriptor is None else sys.stdout),
        ):
            work(report)
        if tell is not None and rank == 0 and descriptor is None:
            tell()
        code = 0
    except UserError as error:
        code, failed = 2, words_of(error)
        if rank == 0:
            say_error(failed)
    except BaseException as error:
        traceback.print_exc()
        failed = f"{type(error).__name__}: {error}"
    sys.stdout.flush()
    sys.stderr.flush()
    _tell_others(failed)
    if code == 2 and rank != 0:  # it may be wrong on this rank alone
        report_once(rank, str(failed))
    os._exit(code)


def _tell_others(failed: str | None) -> None:
    """How this rank ends: one that has gone without a word is missing to those who still write."""
    dog = current_watchdog()
    if dog is None:
        return
    if failed is None:
        dog.stop()
    else:
        dog.failed(failed)


class Display:
    """A bar with the time left on a terminal; elsewhere a line per finished length."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._last: int | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting the ranks", total=1.0)
        return self

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: dict) -> None:
        """An event of rank 0: {"text"}, or a measurement with number, count, share, resumed."""
        text = event.get("text")
        if self._bar is not None and self._task is not None:
            name = text or f"s={event['seq_length']} {event['strategy']} {event['operation']}"
            self._bar.update(self._task, description=name, completed=event.get("share"))
            if text is None and event["status"] not in ("ok", "bytes only"):
                self._bar.console.print(f"{name}: {event['status']}")
            return
        for line in self._lines(event):
            print(line, file=sys.stderr, flush=True)

    def _lines(self, event: dict):
        if "text" in event:
            yield event["text"]
            return
        if event["seq_length"] != self._last:
            self._last = event["seq_length"]
            yield f"{event['share']:4.0%}  s={event['seq_length']} b={event['batch_size']}"
        if event["status"] not in ("ok", "bytes only"):
            yield f"      {event['strategy']} {event['operation']}: {event['status']}"
