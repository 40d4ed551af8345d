"""Which checkpoints of a folder are whole: by the lists of files that lie in them.

Beside every checkpoint that was saved whole lies a list of its files and their sizes. A folder
whose tracker was cut off while it was written is read at the newest checkpoint that is whole.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from megatron_paradyse.errors import UserError
from megatron_paradyse.whole_file import write_whole

LIST = "paradyse-files.json"
LAST_WRITTEN = "metadata.json"  # by Megatron, of the sharded format
HASHES = "integrity.json"  # by Megatron, of --verify-integrity
TRACKER = "latest_checkpointed_iteration.txt"
MAX_LIST_BYTES = 64 << 20


def iteration_to_load(folder: str, wanted: int | None, *, flag: str = "--load") -> int | None:
    """The iteration to load instead of the tracker's, None where the tracker can be read.

    wanted: --ckpt-step. UserError, with the flag that names the folder, where the checkpoint that
    would be loaded is not whole.
    """
    tracker = Path(folder, TRACKER)
    if not tracker.is_file():
        return None
    with tracker.open(errors="replace") as stream:
        text = stream.read(100).strip()
    if wanted is None and text == "release":
        return None
    cut_off = text != "release" and not re.fullmatch(r"\d{1,12}", text)
    if wanted is None and cut_off:
        whole = whole_iterations(folder)
        if not whole:
            raise UserError(
                f"{tracker} holds {text!r:.40}, and no checkpoint beside it is whole: give another "
                f"{flag}, or remove the folder to start anew"
            )
        return whole[-1]
    iteration = int(text) if wanted is None else wanted
    problem = problem_of(folder_of(folder, iteration))
    if problem is not None:
        raise UserError(
            f"the checkpoint of iteration {iteration} in {folder} is not whole: {problem}: "
            f"{others(folder, iteration, flag=flag)}"
        )
    return wanted if cut_off else None


def others(folder: str | None, iteration: int | None, *, flag: str = "--load") -> str:
    whole = [n for n in whole_iterations(folder) if n != iteration]
    return f"load another with --ckpt-step {whole[-1]}" if whole else f"give another {flag}"


def folder_of(folder: str, iteration: int) -> Path:
    return Path(folder, f"iter_{iteration:07d}")


def list_files(checkpoint: Path) -> None:
    """Write the list; the checkpoint must be complete."""
    write_whole(checkpoint / LIST, json.dumps(_sizes(checkpoint), indent=1) + "\n")


def begin_writing(checkpoint: Path) -> None:
    """Of a checkpoint that is written over, as after a restart from an earlier one.

    Its list is of what was there, and a stock run's has none; until list_files() nothing is whole.
    """
    if checkpoint.is_dir():
        write_whole(checkpoint / LIST, "{}\n")


def list_has_no_hash(checkpoint: Path) -> None:
    """Of a checkpoint that is written over: its list is written again when the hashes are there."""
    hashes = json.loads((checkpoint / HASHES).read_text())
    if hashes["files"].pop(LIST, None) is not None:
        write_whole(checkpoint / HASHES, json.dumps(hashes, indent=2))


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
        return None  # of stock Megatron
    except (OSError, ValueError, RecursionError) as error:
        return f"{LIST} cannot be read ({error!s:.100})"
    if not isinstance(listed, dict) or not listed:
        return f"{LIST} lists no files"
    found = _sizes(checkpoint)
    for name, size in listed.items():
        if found.get(name) != size:
            has, since = "missing", ""
            if name in found:
                has, since = f"{found[name]} bytes", _since(checkpoint, name)
            return f"{name!r:.100} is {has}, {size!r:.20} were written{since}"
    return None


def _since(checkpoint: Path, name: str) -> str:
    """What else may be: a stock run saved over it, and knows of no list."""
    if (checkpoint / name).stat().st_mtime_ns <= (checkpoint / LIST).stat().st_mtime_ns:
        return ""
    return f" (if a run without --paradyse has saved it again, remove its {LIST})"


def whole_iterations(folder: str | None) -> list[int]:
    """Those with a list that their files agree with, ascending; of all, not the newest alone."""
    if folder is None:
        return []
    checkpoints = ((n, folder_of(folder, n)) for n in _iterations(folder))
    return [n for n, path in checkpoints if (path / LIST).is_file() and problem_of(path) is None]


def _iterations(folder: str) -> list[int]:
    """Of the checkpoints in a folder, whole or not, ascending."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    numbers = (re.fullmatch(r"iter_(\d{7,12})", name) for name in names)
    return sorted(int(match[1]) for match in numbers if match)


def unfinished_iterations(folder: str, loaded: int) -> list[int]:
    """Beyond the one that is loaded, ascending: those that a save has begun and not ended.

    The sharded format's metadata.json is written last; the legacy format has none.
    """
    found = []
    for iteration in _iterations(folder):
        checkpoint = folder_of(folder, iteration)
        told = (checkpoint / LIST).exists() or (checkpoint / LAST_WRITTEN).exists()
        legacy = any(checkpoint.glob("mp_rank_*"))
        if iteration > loaded and (problem_of(checkpoint) or not (told or legacy)):
            found.append(iteration)
    return found
