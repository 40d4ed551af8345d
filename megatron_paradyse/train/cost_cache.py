"""Where costs that a run made for itself are kept, and under which name."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch

from megatron_paradyse.costs.description import MEMORY_TOLERANCE
from megatron_paradyse.errors import UserError
from megatron_paradyse.machine import cpu_name, system_memory_bytes
from megatron_paradyse.settings import PACKED, Settings
from megatron_paradyse.strategies import with_names_of_costs
from megatron_paradyse.train.agreement import code_digest
from megatron_paradyse.train.describe import versions
from megatron_paradyse.train.model_kind import GPT
from megatron_paradyse.train.model_layers import ModelLayers, count_layers

# Arguments that change no cost: what is learnt, logged, saved, read, and how long. A start from a
# checkpoint has others than the one after it, and shall find its costs. A tokenizer
# does: its vocabulary is not known yet.
WITHOUT_EFFECT = re.compile(
    r"(rank|local_rank|seed|(.*_)?lr(_.*)?|weight_decay.*|adam_.*|clip_grad|init_method.*|"
    r"loss_scale.*|train_.*|eval_.*|full_validation|exit_.*|save.*|load.*|.*ckpt.*|log_.*|"
    r"tensorboard.*|wandb.*|timing_.*|(.*_)?data_path|split|data_args.*|data_cache.*|"
    r"num_workers|global_batch_size|rampup.*|consumed.*|iteration|skipped.*|paradyse.*|start_.*|"
    r"do_.*|non_.*|phase_.*|num_dataset.*|finetune|pretrained_checkpoint|use_checkpoint_.*|"
    r"no_load_.*|no_save_.*|override_opt_.*|async_save|verify_integrity|profile.*|pytorch_profiler.*|"
    r"use_pytorch_profiler|record_memory_history|memory_snapshot_path)"
)

# Folders of this package that make no costs. A change of any other makes costs anew, once.
CODE_WITHOUT_EFFECT = ("data", "doctor", "planner", "preview", "report", "train")
# But for these: a run that they describe otherwise refuses costs that were kept before.
DESCRIBING = ("train/describe.py", "train/model_layers.py")


def cache_folder() -> Path:
    """Where costs are kept: $MEGATRON_PARADYSE_CACHE, or the user's cache folder.

    It begins with ~ for a user of whom no home is known, as in a container.
    """
    named = os.environ.get("MEGATRON_PARADYSE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(named or f"{base}/megatron-paradyse"))


def cached_costs(args: argparse.Namespace, settings: Settings) -> Path:
    """The file of this run's costs, whether it is there or not."""
    if str(cache_folder()).startswith("~"):
        raise UserError(
            "costs are kept in a folder of the user's, and none is known: set HOME, or "
            "MEGATRON_PARADYSE_CACHE"
        )
    return cache_folder() / f"costs-{cost_key(args, settings)}.json"


@contextlib.contextmanager
def stem_of_own(costs: Path) -> Iterator[str]:
    """What names begin with of the files from which these costs are made, of this job alone.

    An interrupted profile goes on with its file; where another job measures the same just now, this
    one makes another, which is not kept.
    """
    lock = costs.with_suffix(".lock")
    with lock.open("w") as held:
        alone = _locks(held)
        stem = costs.stem if alone else f"{costs.stem}-{secrets.token_hex(4)}"
        try:
            yield stem
        finally:
            ended = lock if alone else costs.with_name(f"{stem}.raw.json")
            ended.unlink(missing_ok=True)


def _locks(file: TextIO) -> bool:
    """Whether no other process holds the file, on a disk that can tell, nor has removed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        return True


def cost_key(args: argparse.Namespace, settings: Settings) -> str:
    """Of everything that the costs may depend on: an argument that is not known counts."""
    values = {
        name: repr(value)
        for name, value in vars(args).items()
        if not WITHOUT_EFFECT.fullmatch(name)
    }
    values |= _as_without_a_checkpoint(args)
    values |= {
        "head_tile": repr(settings.head_tile),
        "strategies": repr(measured_strategies(settings)),
    }
    values |= {"rows": "measured"} if settings.sequences == PACKED else {}
    values |= {"model": args.paradyse_model} if args.paradyse_model != GPT else {}
    others = ModelLayers.of_arguments(args, count_layers(args)).kinds().others
    values |= {"layers": repr(others)} if others else {}
    values |= {"code": code_digest(CODE_WITHOUT_EFFECT, DESCRIBING)}
    values |= {"device": f"{device_name()}, {_size()}", "versions": repr(versions())}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _as_without_a_checkpoint(args: argparse.Namespace) -> dict[str, str]:
    """What --use-checkpoint-args sets to what Megatron would make of the flags itself."""
    found = {}
    if not args.group_query_attention:
        found["num_query_groups"] = repr(None)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    if (
        args.vocab_size
        and args.padded_vocab_size == math.ceil(args.vocab_size / multiple) * multiple
    ):
        found["padded_vocab_size"] = repr(None)
    return found


def measured_strategies(settings: Settings) -> tuple[str, ...] | None:
    """Those to measure: what plans may name, and what the costs of that need; None: all."""
    if not settings.strategies:
        return None
    layers = (settings.layers or {}).values()
    of_layers = (name for layer in layers for name in (*layer.attention, *layer.mlp))
    return with_names_of_costs((*settings.strategies, *of_layers))


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def _size() -> str:
    """What devices of one name may differ in: costs of the other are refused, or of other times."""
    if not torch.cuda.is_available():
        steps = round(math.log(system_memory_bytes()) / math.log1p(MEMORY_TOLERANCE))
        cores, threads = os.cpu_count(), torch.get_num_threads()
        return f"{cores} cores, {threads} threads, {steps} steps of memory"
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return f"{total / (1 << 30):.0f} GiB"
