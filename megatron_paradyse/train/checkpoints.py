"""Around Megatron's saving and loading: one line where it fails, and nothing broken is read.

Beside every checkpoint that was saved whole lies a list of its files and their sizes. Before one is
loaded its files are compared with that list; a folder whose tracker was cut off while it was
written is read at the newest checkpoint that is whole.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.training import get_args, print_rank_0, training

from megatron_paradyse.errors import UserError
from megatron_paradyse.train.ending import is_lost_peer
from megatron_paradyse.whole_file import write_whole

LIST = "paradyse-files.json"
TRACKER = "latest_checkpointed_iteration.txt"
MAX_LIST_BYTES = 64 << 20


def install() -> None:
    """Wrap save_checkpoint and load_checkpoint where Megatron's training loop looks them up."""
    training.save_checkpoint = _saving(training.save_checkpoint)
    training.load_checkpoint = _loading(training.load_checkpoint)


def _saving(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_whole(iteration: int, *args: Any, **kwargs: Any) -> Any:
        folder = get_args().save
        try:
            result = save(iteration, *args, **kwargs)
            checkpoint = folder_of(folder, iteration)
            first = torch.distributed.get_rank() == 0
            if first and checkpoint.is_dir() and not get_args().async_save:
                list_files(checkpoint)
        except Exception as error:
            if is_lost_peer(error):
                raise
            others = [n for n in whole_iterations(folder) if n < iteration]
            remedy = f"iteration {others[-1]} is whole: make room" if others else "make room"
            raise UserError(
                f"the checkpoint of iteration {iteration} cannot be written to {folder}: "
                f"{reason_of(error)}: {remedy}, and start again with --load {folder}"
            ) from error
        return result

    return save_whole


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_whole(*args: Any, **kwargs: Any) -> Any:
        megatron = get_args()
        folder = megatron.load
        if folder is not None:
            iteration = iteration_to_load(folder, megatron.ckpt_step)
            if iteration is not None:
                megatron.ckpt_step = iteration
        try:
            return load(*args, **kwargs)
        except (Exception, SystemExit) as error:
            stopped = isinstance(error, SystemExit) and megatron.exit_on_missing_checkpoint
            if stopped or is_lost_peer(error) or isinstance(error, UserError):
                raise
            raise UserError(
                f"the checkpoint in {folder} cannot be loaded: {reason_of(error)}: "
                f"{_others(folder, None)}"
            ) from error

    return load_whole


def iteration_to_load(folder: str, wanted: int | None) -> int | None:
    """The iteration to load instead of the tracker's, None where the tracker is right.

    UserError where the checkpoint that would be loaded is not whole.
    """
    tracker = Path(folder, TRACKER)
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace")[:100].strip()
    if wanted is None and text == "release":
        return None
    if wanted is None and not re.fullmatch(r"\d{1,12}", text):
        whole = whole_iterations(folder)
        if not whole:
            raise UserError(
                f"{tracker} holds {text!r:.40}, and no checkpoint beside it is whole: give another "
                "--load, or remove the folder to start anew"
            )
        print_rank_0(
            f"> paradyse: {tracker} was cut off (it holds {text!r:.40}): loading iteration "
            f"{whole[-1]}, the newest that is whole"
        )
        return whole[-1]
    iteration = int(text) if wanted is None else wanted
    problem = problem_of(folder_of(folder, iteration))
    if problem is not None:
        raise UserError(
            f"the checkpoint of iteration {iteration} in {folder} is not whole: {problem}: "
            f"{_others(folder, iteration)}"
        )
    return None


def _others(folder: str, iteration: int | None) -> str:
    whole = [n for n in whole_iterations(folder) if n != iteration]
    return f"load an earlier one with --ckpt-step {whole[-1]}" if whole else "give another --load"


def folder_of(folder: str, iteration: int) -> Path:
    return Path(folder, f"iter_{iteration:07d}")


def list_files(checkpoint: Path) -> None:
    """Write the list; the checkpoint must be complete."""
    write_whole(checkpoint / LIST, json.dumps(_sizes(checkpoint), indent=1) + "\n")


def _sizes(checkpoint: Path) -> dict[str, int]:
    return {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != LIST
    }


def problem_of(checkpoint: Path) -> str | None:
    """What its files lack by the list, None where nothing is known to."""
    if not checkpoint.is_dir():
        return "its folder is not there"
    try:
        if (checkpoint / LIST).stat().st_size > MAX_LIST_BYTES:
            return f"{LIST} is too large"
        listed = json.loads((checkpoint / LIST).read_text())
    except FileNotFoundError:
        return None  # of stock Megatron, or of an asynchronous save
    except (OSError, ValueError) as error:
        return f"{LIST} cannot be read ({error})"
    if not isinstance(listed, dict) or not listed:
        return f"{LIST} lists no files"
    found = _sizes(checkpoint)
    for name, size in listed.items():
        if found.get(name) != size:
            has = f"{found[name]} bytes" if name in found else "missing"
            return f"{name!r:.100} is {has}, {size!r:.20} were written"
    return None


def whole_iterations(folder: str | None) -> list[int]:
    """Those with a list that their files agree with, ascending; of all, not the newest alone."""
    if folder is None or not os.path.isdir(folder):
        return []
    numbers = (re.fullmatch(r"iter_(\d{7,12})", name) for name in os.listdir(folder))
    return sorted(
        int(match[1])
        for match in numbers
        if match
        and Path(folder, match[0], LIST).is_file()
        and problem_of(Path(folder, match[0])) is None
    )


def reason_of(error: BaseException) -> str:
    """The cause in one line: of torch's checkpoints the first rank's."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        rank, failure = next(iter(failures.items()))
        cause = failure[0] if isinstance(failure, tuple) else failure
        return f"rank {rank}: {reason_of(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    if isinstance(error, SystemExit):
        return "Megatron cannot read it"
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {' '.join(first.split())}"[:300]
