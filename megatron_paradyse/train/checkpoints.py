"""Around Megatron's saving and loading: one line where it fails, and nothing broken is read.

What is written holds Megatron's arguments as a stock run can take them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import re
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.training import checkpointing, get_args, print_rank_0, training
from torch.distributed.checkpoint.api import CheckpointException

from megatron_paradyse.errors import UserError
from megatron_paradyse.megatron_start import other_values
from megatron_paradyse.train import counting
from megatron_paradyse.train.byte_buffers import release_byte_buffers
from megatron_paradyse.train.checkpoint_files import (
    begin_writing,
    folder_of,
    list_has_no_hash,
    others,
    unfinished_iterations,
    whole_iterations,
)
from megatron_paradyse.train.checkpoint_listing import listed_at_once, listed_when_written
from megatron_paradyse.train.checkpoint_source import source, whole
from megatron_paradyse.train.checkpoint_states import check_expert_states, check_order
from megatron_paradyse.train.checkpoint_weights import OF_ITS_RUN, weights_all_read
from megatron_paradyse.train.ending import is_lost_peer, is_out_of_memory
from megatron_paradyse.train.helper_processes import managers_end_with_this_process

# What Megatron says of a checkpoint that is whole, but of another run -> the remedy.
_ITS_FLAGS = "give the flags that it was trained with, or another --load"
_ITS_PARTS = f"it has other parts than this model: {OF_ITS_RUN}"
_ITS_OPTIMIZER = (
    "give the optimizer that it was trained with (--optimizer, --use-distributed-optimizer), or "
    "--no-load-optim"
)
_OF_LEGACY = "Error(s) in loading state_dict"
_PARAMETERS = "fp32_param"  # which an optimizer of a half type saves besides its states
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.")
_MISSED = re.compile(rf"{_STATE.pattern}.* from model not in state dict: (.*)", re.DOTALL)
_NO_STATES = (
    "it holds no states of an optimizer, as where --fp16 skipped every step: give --no-load-optim, "
    "and a lower --initial-loss-scale"
)
_ITS_RATES = (  # by which Megatron's optimizer looks its groups of parameters up, among others
    "give the --lr and --min-lr that it was trained with (--override-opt-param-scheduler does not "
    "help), or --no-load-optim"
)
OF_ANOTHER_RUN = {
    "OptimizerParamScheduler": "give --override-opt-param-scheduler to follow this run's schedule, "
    "or --use-checkpoint-opt-param-scheduler the checkpoint's",
    "is not equal to the input argument value": _ITS_FLAGS,
    "shape mismatch": _ITS_FLAGS,
    "size mismatch for": _ITS_FLAGS,  # of the legacy format
    "distrib_optim_sharding_type": _ITS_OPTIMIZER,
    "flattened_range is not supported": _ITS_OPTIMIZER,
    'KeyError: "optimizer.state.': _ITS_OPTIMIZER,
    'KeyError: "chained_': _ITS_OPTIMIZER,
    "from model not in state dict": _ITS_PARTS,
    "Missing key in checkpoint state_dict": _ITS_PARTS,
    "KeyError: 'optimizer'": "it was saved with --no-save-optim: give --no-load-optim, or another "
    "--load",
    "Could not find parameter group": _ITS_RATES,
    "KeyError: (": _ITS_RATES,  # the same of the distributed optimizer
    "unexpected keyword argument 'strides'": "leave --dist-ckpt-strictness out, with which "
    "Megatron 0.19 cannot read what this PyTorch tells of a checkpoint's tensors",
    "(TP, PP) mismatch after resume": "load it on the grid that it was trained on and save it with "
    "--dist-ckpt-optim-fully-reshardable, or --no-load-optim",
}


def install() -> None:
    """Wrap save_checkpoint and load_checkpoint where Megatron's training loop looks them up."""
    training.save_checkpoint = _saving(training.save_checkpoint)
    training.load_checkpoint = _loading(training.load_checkpoint)
    training.maybe_finalize_async_save = _finalizing(training.maybe_finalize_async_save)
    training.append_to_progress_log = _progressing(training.append_to_progress_log)
    serialization.save_integrity_manifest = _hashing(serialization.save_integrity_manifest)
    checkpointing.check_checkpoint_args = _comparing(checkpointing.check_checkpoint_args)


def _saving(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_whole(iteration: int, *args: Any, **kwargs: Any) -> Any:
        folder, at_once = get_args().save, not get_args().async_save
        kept = torch.distributed.get_rank() == 0 and not kwargs.get("non_persistent_ckpt")
        collecting = gc.isenabled()
        gc.disable()  # until release_byte_buffers()
        try:
            checkpoint = folder_of(folder, iteration)
            if kept:
                begin_writing(checkpoint)
            listing = listed_at_once if at_once else listed_when_written
            listed = listing(checkpoint) if kept else contextlib.nullcontext()
            with as_given(get_args()), managers_end_with_this_process(), listed:
                result = save(iteration, *args, **kwargs)
        except (Exception, CheckpointException) as error:
            release_byte_buffers()
            if is_lost_peer(error) or is_out_of_memory(error):
                raise
            raise UserError(
                f"the checkpoint of iteration {iteration} cannot be written to {folder}: "
                f"{reason_of(error)}: {_make_room(folder, before=iteration)}"
            ) from error
        finally:
            if collecting:
                gc.enable()
        return result

    return save_whole


def _make_room(folder: str, *, before: float = inf) -> str:
    whole = [n for n in whole_iterations(folder) if n < before]
    remedy = f"iteration {whole[-1]} is whole: make room" if whole else "make room"
    return f"{remedy}, and start again with --load {folder}"


def _hashing(save_hashes: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save_hashes)
    def save_hashes_of_megatrons(checkpoint: str) -> None:
        save_hashes(checkpoint)
        list_has_no_hash(Path(checkpoint))

    return save_hashes_of_megatrons


def _finalizing(finalize: Callable[..., Any]) -> Callable[..., Any]:
    """What Megatron does between iterations and at the end for saves in the background."""

    @functools.wraps(finalize)
    def finalize_whole(*args: Any, **kwargs: Any) -> Any:
        try:
            return finalize(*args, **kwargs)
        except (Exception, CheckpointException) as error:
            if is_lost_peer(error) or isinstance(error, UserError):
                raise
            folder = get_args().save
            raise UserError(
                f"a checkpoint in the background cannot be written to {folder}: "
                f"{reason_of(error)}: {_make_room(folder)}"
            ) from error

    return finalize_whole


def _progressing(append: Callable[..., Any]) -> Callable[..., Any]:
    """Of --log-progress, which the first rank writes beside the checkpoints."""

    @functools.wraps(append)
    def append_in_one_line(*args: Any, **kwargs: Any) -> Any:
        try:
            return append(*args, **kwargs)
        except OSError as error:
            raise UserError(
                f"--log-progress cannot be written to {get_args().save}: {reason_of(error)}: give "
                "a --save that can, or leave it out"
            ) from error

    return append_in_one_line


@contextlib.contextmanager
def as_given(args: argparse.Namespace) -> Iterator[None]:
    """While a checkpoint is written, Megatron's arguments without what this package has set.

    A stock run may take some from it (--use-checkpoint-args), and could not unpickle our settings.
    """
    given = args.paradyse_instead_of
    ours = {name: getattr(args, name) for name in (*given, "paradyse_settings")}
    del args.paradyse_settings
    vars(args).update(given)
    try:
        yield
    finally:
        vars(args).update(ours)


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_whole(*args: Any, **kwargs: Any) -> Any:
        megatron = get_args()
        flag, folder = source(megatron)
        converted = megatron.ckpt_convert_format
        if converted is not None and not checkpointing.checkpoint_exists(folder):
            raise UserError(  # Megatron would end with exit code 0
                f"--ckpt-convert-format {converted}: no checkpoint in {flag} {folder}: give the "
                "folder of one"
            )
        # Megatron asks a checkpoint for what it would save, and then misses the rest.
        asks_for_all = other_values(megatron, no_save_optim=None, no_save_rng=None)
        with _reading(megatron, flag, folder), asks_for_all, weights_all_read(folder):
            result = load(*args, **kwargs)
        _tell_unfinished(folder)
        return result

    return load_whole


def reading_arguments(load: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's load_args_from_checkpoint, which --use-checkpoint-args runs before all else."""

    @functools.wraps(load)
    def load_whole(args: argparse.Namespace, load_arg: str = "load", **kwargs: Any) -> Any:
        folder = getattr(args, load_arg)
        if not getattr(args, "paradyse", False) or folder is None:
            return load(args, load_arg, **kwargs)
        with _reading(args, f"--{load_arg.replace('_', '-')}", folder):
            return load(args, load_arg, **kwargs)

    return load_whole


@contextlib.contextmanager
def _reading(args: argparse.Namespace, flag: str, folder: str | None) -> Iterator[None]:
    """While Megatron reads the checkpoint in this folder, which the flag names."""
    try:
        with whole(folder, args.ckpt_step, flag=flag):
            yield
    except (Exception, SystemExit, CheckpointException) as error:
        missing = args.exit_on_missing_checkpoint and not checkpointing.checkpoint_exists(folder)
        stopped = isinstance(error, SystemExit) and missing
        known = is_lost_peer(error) or is_out_of_memory(error) or isinstance(error, UserError)
        if stopped or known:
            raise
        remedy = remedy_of(error)
        remedy = remedy or others(folder, checkpointing.get_loaded_iteration(), flag=flag)
        raise UserError(
            f"the checkpoint in {folder} cannot be loaded: {reason_of(error)}: {remedy}"
        ) from error


def remedy_of(error: BaseException) -> str | None:
    """Where the checkpoint is whole, but of another run; None of any other error."""
    _, cause = _of_first_rank(error)
    missed = _MISSED.match(str(cause.args[0]) if cause.args else "")
    if missed and missed[1] != _PARAMETERS and {*_STATE.findall(missed[2])} == {_PARAMETERS}:
        return _NO_STATES
    reason = reason_of(error)
    return next((remedy for words, remedy in OF_ANOTHER_RUN.items() if words in reason), None)


def _tell_unfinished(folder: str | None) -> None:
    if folder is None or torch.distributed.get_rank() != 0:
        return
    loaded = checkpointing.get_loaded_iteration() or 0
    for iteration in unfinished_iterations(folder, loaded)[-1:]:
        print_rank_0(
            f"> paradyse: the save of iteration {iteration} in {folder} was cut off: it is not "
            "loaded, and may be removed"
        )


def _comparing(check: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's check of a checkpoint, and what it does not see."""

    @functools.wraps(check)
    def compare(of_checkpoint: argparse.Namespace, *args: Any, **kwargs: Any) -> Any:
        result = check(of_checkpoint, *args, **kwargs)
        check_order(get_args(), of_checkpoint)
        check_expert_states(get_args(), of_checkpoint)
        said = counting.warning(get_args(), of_checkpoint)
        if said is not None:
            print_rank_0(f"> paradyse: {said}")
        return result

    return compare


def reason_of(error: BaseException) -> str:
    """The cause in one line: of torch's checkpoints the first rank's. Without Megatron's advice:
    the flag that it names has long been its default.
    """
    rank, cause = _of_first_rank(error)
    if rank is not None:
        return f"rank {rank}: {reason_of(cause)}"
    if isinstance(error, CheckpointException):
        return "a process that writes for a rank has failed"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    if isinstance(error, SystemExit):
        return "Megatron cannot read it"
    lines = [line for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith(_OF_LEGACY):
        del lines[0]  # what differs follows, a line each
    first = next(iter(lines), "")
    words = " ".join(first.split()).partition(". Please use ")[0].rstrip(".")
    named = words and isinstance(error, AssertionError)  # a check that says what it wants
    kind = type(error).__name__
    return (words if named else f"{kind}: {words}" if words else kind)[:300]


def _of_first_rank(error: BaseException) -> tuple[int | None, BaseException]:
    """Of torch's checkpoints the first that failed and why; of others the error itself."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return None, error
    rank, failure = next(iter(failures.items()))
    return rank, failure[0] if isinstance(failure, tuple) else failure
