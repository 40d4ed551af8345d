"""Before anything runs: would all ranks plan and compute alike? Each difference is named.

Compared over the ranks' store are digests of the code and its versions, of the flags and settings
that matter, and of the files that they name: costs, plan, data. What a rank reads from files is
compared by content, so that machines may keep them at different paths.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

import torch

import megatron_paradyse
from megatron_paradyse.errors import UserError
from megatron_paradyse.settings import Settings
from megatron_paradyse.train.data_files import data_prefixes
from megatron_paradyse.train.describe import versions
from megatron_paradyse.train.meeting import meet, ranks

# Flags that may differ: a rank's own place, and where it reads, writes and logs.
OWN = re.compile(
    r"rank|local_rank|init_method|tensorboard.*|wandb.*|log_.*|logging_level|data_cache_path|"
    r"data_path|data_args_path|.*_data_path|per_split_data_args_path|vocab_file|merge_file|"
    r"tokenizer_model|save|load|pretrained_checkpoint|non_persistent_.*_ckpt_dir|"
    r"paradyse_(config|settings|trace|log|debug|cost_model|watchdog_seconds)|"
    r"result_rejected_tracker_filename|config_logger_dir"
)
SETTINGS_OF_OWN = ("trace", "log", "cost_model", "watchdog_seconds")
SECONDS_TO_HEAR = 5
HEAD_BYTES = 1 << 20  # of a file of data; its size is compared too

Values = dict[str, str]  # what is compared -> its value, as a text


def agree(args: argparse.Namespace, *, seconds: float) -> None:
    """UserError, alike on all ranks, naming the ranks that differ, in what, and the values.

    All ranks must call it; seconds: that the last of them may take to come.
    """
    rank, world = ranks()
    if world == 1:
        return
    store = meet("agreement", seconds=seconds)
    mine = values_of(args)
    store.set(f"digest {rank}", digest(json.dumps(mine, sort_keys=True).encode()))
    if rank == 0:
        store.set("verdict", _said(_compare, store, world, seconds))
    verdict = _hear(store, ["verdict"], 2 * seconds, "the first rank")[0].decode()
    if verdict == "tell":
        store.set(f"values {rank}", json.dumps(mine))
        if rank == 0:
            store.set("difference", _said(_difference, store, world, seconds))
        verdict = _hear(store, ["difference"], 2 * seconds, "the first rank")[0].decode()
    store.add("heard", 1)
    deadline = time.monotonic() + SECONDS_TO_HEAR  # the store may end with the first rank
    while rank == 0 and store.add("heard", 0) < world and time.monotonic() < deadline:
        time.sleep(0.02)
    if verdict != "alike":
        raise UserError(verdict)


def _said(find: Callable[..., str], *arguments: object) -> str:
    """What it finds, or why it cannot: the other ranks wait for a word either way."""
    try:
        return find(*arguments)
    except UserError as error:
        return str(error)


def values_of(args: argparse.Namespace) -> Values:
    """Everything that ranks must have in common."""
    found = {f"the version of {name}": text for name, text in versions().items()}
    found["the version of python"] = platform.python_version()
    found["the version of megatron_paradyse"] = megatron_paradyse.__version__
    found["the code of megatron_paradyse"] = code_digest()
    for name, value in vars(args).items():
        if not OWN.fullmatch(name):
            found[f"--{name.replace('_', '-')}"] = f"{value!r:.200}"
    settings = getattr(args, "paradyse_settings", None)
    for name, value in ({} if settings is None else vars(settings)).items():
        if name not in SETTINGS_OF_OWN:
            found[f"--paradyse-{name.replace('_', '-')}"] = f"{value!r:.2000}"
    if settings is not None and settings.policy.startswith("plan:"):
        found["--paradyse-policy"] = "plan"
    return found | _file_values(args, settings)


@cache
def sources() -> dict[Path, bytes]:
    """Of this package, the digest of each by its path in it."""
    root = Path(megatron_paradyse.__file__).parent
    paths = sorted(root.rglob("*.py"))
    return {path.relative_to(root): hashlib.sha256(path.read_bytes()).digest() for path in paths}


def code_digest(without: Collection[str] = (), but: Collection[str] = ()) -> str:
    """Of the sources of this package, by their paths and contents.

    without: folders left out, but for these files of them.
    """
    hashed = hashlib.sha256()
    for path, digest in sources().items():
        if path.parts[0] not in without or path.as_posix() in but:
            hashed.update(f"{path.as_posix()}\0".encode() + digest)
    return hashed.hexdigest()[:16]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _file_values(args: argparse.Namespace, settings: Settings | None) -> Values:
    """Of the files that decide what is planned and learnt; one that is not there counts too."""
    found: Values = {}
    if settings is not None:
        if settings.cost_model is not None:
            found["the cost file"] = _file_digest(settings.cost_model)
        kind, _, path = settings.policy.partition(":")
        if kind == "plan":
            found["the plan file"] = _file_digest(path)
    try:
        prefixes = data_prefixes(args)
    except UserError as error:  # the others wait for a word
        return found | {"the data sets": str(error)}
    for number, prefix in enumerate(prefixes, 1):
        for suffix in (".idx", ".bin", ".targets"):
            if Path(prefix + suffix).exists():
                found[f"data set {number} ({suffix})"] = _file_digest(prefix + suffix)
    return found


def _file_digest(path: str) -> str:
    try:
        with open(path, "rb") as stream:
            head = stream.read(HEAD_BYTES)
            return f"{digest(head)}, {stream.seek(0, 2)} bytes"
    except OSError as error:
        return f"not there ({error.strerror})"


def _compare(store, world: int, seconds: float) -> str:
    """ "alike", or that the ranks must tell their values."""
    digests = _hear(store, [f"digest {rank}" for rank in range(world)], seconds, "ranks")
    return "alike" if len(set(digests)) == 1 else "tell"


def _difference(store, world: int, seconds: float) -> str:
    """The sentence about the first thing that differs, by what most ranks have."""
    contents = _hear(store, [f"values {rank}" for rank in range(world)], seconds, "ranks")
    everyone: list[Values] = [json.loads(content) for content in contents]
    names = dict.fromkeys(name for values in everyone for name in values)
    different = [n for n in names if len({values.get(n, "none") for values in everyone}) > 1]
    name = different[0]
    found = [values.get(name, "none") for values in everyone]
    usual = Counter(found).most_common(1)[0][0]
    odd = [rank for rank, value in enumerate(found) if value != usual]
    others = ", ".join(different[1:4]) + (" and more" if len(different) > 4 else "")
    return (
        f"rank{'s' if len(odd) > 1 else ''} {_some(odd)} of {world} would compute something else: "
        f"{name} is {found[odd[0]]:.80} there and {usual:.80} on the others"
        + (f" (also different: {others})" if others else "")
        + ": give all ranks the same flags, files and versions"
    )


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" and more" if len(numbers) > 8 else "")


def _hear(store, keys: list[str], seconds: float, who: str) -> list[bytes]:
    """The values of keys once they are there; UserError names the ranks that never came."""
    deadline = time.monotonic() + seconds
    try:
        while not store.check(keys):
            if time.monotonic() > deadline:
                missing = [key for key in keys if not store.check([key])]
                absent = [int(key.split()[1]) for key in missing if key.split()[-1].isdigit()]
                who = f"ranks {_some(absent)}" if absent else who
                raise UserError(
                    f"no word of {who} for {seconds:g} s: see their logs, then start again"
                )
            time.sleep(0.02)
        return store.multi_get(keys)
    except torch.distributed.DistError as error:
        raise UserError(
            "the first rank ended before the ranks had agreed: see its log, then start again"
        ) from error
