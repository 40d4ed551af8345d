"""What Megatron 0.19 takes for granted as it starts: its GPU packages, a checkout, short sequences.

Without TransformerEngine or apex, Megatron's defaults end in errors that name neither; installed as
a wheel it cannot compile what the wheel has compiled already. The functions below change what would
end so, and nothing else. On a CPU, cpu_platform.py does the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_paradyse import gpu_packages
from megatron_paradyse.errors import UserError
from megatron_paradyse.tokenizer_hub import cache_alone_if_unreachable

# Arguments that need a package, and their values without it.
WITHOUT_ENGINE: dict[str, Any] = {"transformer_impl": "local", "apply_rope_fusion": False}
WITHOUT_APEX: dict[str, Any] = {"no_persist_layer_norm": True}
WITHOUT_GRADIENT_KERNEL: dict[str, Any] = {"gradient_accumulation_fusion": False}
WITHOUT_SOFTMAX_KERNEL: dict[str, Any] = {"masked_softmax_fusion": False}
WITHOUT_RESILIENCY: dict[str, Any] = {"async_strategy": "mcore"}
FLAGS = {
    "transformer_impl": "--transformer-impl local",
    "apply_rope_fusion": "--no-rope-fusion",
    "no_persist_layer_norm": "--no-persist-layer-norm",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "async_strategy": "--async-strategy mcore",
}
# Packages at which Megatron's import may end, by what a traceback calls them, and what helps.
BROKEN = {
    "transformer_engine": "pip install --no-build-isolation 'transformer-engine[pytorch]', or "
    "pip uninstall transformer-engine",
    "nvidia_resiliency_ext": "pip install 'nvidia-resiliency-ext>=0.6', or pip uninstall "
    "nvidia-resiliency-ext",
    "apex": "build apex for this PyTorch, or pip uninstall apex",
}
WARM_UP_POSITIONS = 4096
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the first: of every torch
EXPANDABLE = "expandable_segments:True"  # lengths differ, and so do the blocks that are asked for
# Memory for another process or for NCCL: not every torch gives it out of such segments.
SHARING_FLAGS = ("--async-save", "--nccl-ub")
# Of a compiled function: one for each kind of arguments. Beyond PyTorch's limit, 8, it runs eagerly
# and has other dropout masks: a second run would not drop what the first one dropped.
MOST_VARIANTS = 64


def before_cuda() -> None:
    """What CUDA and PyTorch's allocator read once, as they start: call it first.

    An allocator that the user has set, by either name, stays so.
    """
    use_one_connection()
    if allocator_settings() is None and not any(flag in sys.argv for flag in SHARING_FLAGS):
        os.environ[ALLOCATORS[0]] = EXPANDABLE


def allocator_settings() -> str | None:
    return next((os.environ[name] for name in ALLOCATORS if name in os.environ), None)


def use_one_connection() -> None:
    """Kernels start in the order of their calls, as Megatron demands up to Hopper.

    Only what is set before CUDA is asked for anything counts: call it first.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def cannot_import(error: Exception) -> UserError:
    """For what Megatron's import ended in: a package is broken, or too old for it.

    It does without packages whose import fails as that of one that is not there, and no others.
    """
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:150]
    frames = traceback.extract_tb(error.__traceback__)
    # Of a frame its package: Megatron has modules named after those that they wrap.
    folders = [Path(frame.filename).parent.parts for frame in reversed(frames)]
    places = [reason.replace("-", "_"), *folders]
    remedies = (BROKEN[name] for place in places for name in BROKEN if name in place)
    remedy = next(remedies, "install, mend or uninstall the package that it names")
    return UserError(f"Megatron cannot be imported ({reason}): {remedy}")


def use_own_device(args: argparse.Namespace) -> None:
    """What asks for "cuda" gets this rank's device from now on, as Megatron will choose it.

    Until then it would get the first one, and every rank a context there.
    """
    import torch

    if torch.cuda.device_count() > 0:
        torch.cuda.set_device(args.local_rank)


def allow_variants() -> None:
    """Let a compiled function have MOST_VARIANTS, or more where the user allows them."""
    import torch

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_VARIANTS)


def make_ready() -> bool:
    """Patch Megatron, without a GPU with the CPU platform under it too; whether that is so."""
    import torch

    if torch.cuda.is_available():
        if reason := gpu_packages.hide_broken_apex():
            say_once(f"apex is left out, for its compiled parts are not there ({reason})")
        install()
        return False
    from megatron_paradyse import cpu_platform

    cpu_platform.install()
    return True


def install() -> None:
    """Patch Megatron, once it can be imported."""
    import megatron.core.datasets.utils as dataset_utils
    import megatron.training.global_vars as global_vars
    import megatron.training.training as training
    from megatron.core import utils
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe.moe_utils import RouterGatingLinearFunction

    from megatron_paradyse import plain_adam

    allow_variants()
    plain_adam.install()
    dataset_utils.compile_helpers = _compile_in_a_checkout(dataset_utils.compile_helpers)
    global_vars.build_tokenizer = _in_one_line(global_vars.build_tokenizer)
    for kind in ("tensorboard", "wandb"):
        name = f"_set_{kind}_writer"
        setattr(global_vars, name, _opens_log(getattr(global_vars, name), kind))
    training.set_jit_fusion_options = _short_warm_up(training.set_jit_fusion_options)
    utils.StragglerDetector.__exit__ = _stop_in_silence
    torch_norm.WrappedTorchNorm.__new__ = _norm_with_sequence_parallel(
        torch_norm.WrappedTorchNorm.__new__
    )
    RouterGatingLinearFunction.backward = _of_rows(RouterGatingLinearFunction.backward)


def _of_rows(backward):
    """The backward of the scores of experts, of a gradient whose rows lie one after another.

    TransformerEngine's product, which Megatron takes where it is installed, reads it so in any
    case; with --moe-router-load-balancing-type sinkhorn it comes transposed.
    """
    return staticmethod(lambda ctx, grad: backward(ctx, grad.contiguous()))


def _stop_in_silence(detector, *error: object) -> bool:
    """The end of what --log-straggler times, in every training; the error goes on.

    Megatron logs its traceback here. What an error says follows once nothing has caught it.
    """
    detector.stop()
    return False


def _compile_in_a_checkout(compile_helpers):
    """What the wheel has compiled stays as it is; a failure says what it takes."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        return lambda: None
    folder = Path(compile_helpers.__code__.co_filename).parent

    @functools.wraps(compile_helpers)
    def run():
        try:
            compile_helpers()
        except (SystemExit, OSError) as error:  # OSError: there is no make
            raise UserError(
                f"Megatron could not compile helpers.cpp of {folder}: install make, a C++ compiler "
                "and pybind11 for the python3 of PATH"
            ) from error

    return run


def _in_one_line(build_tokenizer):
    """Megatron's errors name neither the tokenizer nor the flag of its files."""

    @functools.wraps(build_tokenizer)
    def run(args, **options):
        if args.vocab_size is not None and args.vocab_size < 1:  # 0 counts as not given there
            raise UserError(f"--vocab-size {args.vocab_size}: give the number of ids, 1 or more")
        try:
            with cache_alone_if_unreachable(args) as news:
                if news is not None:
                    say_once(news)
                return build_tokenizer(args, **options)
        except Exception as error:
            reason, alone = f"{type(error).__name__}: {str(error)[:300]}", ""
            if args.vocab_size is not None:
                alone = f", without --vocab-size {args.vocab_size}, which counts in its place"
            raise UserError(
                f"the tokenizer {args.tokenizer_type} cannot be built ({reason}): give data that "
                f"'megatron-paradyse data prepare' wrote, which name their vocabulary{alone}; or "
                "the tokenizer's files by --tokenizer-model, or --vocab-file and --merge-file; or, "
                "as tokens are ready, --tokenizer-type NullTokenizer --vocab-size N"
            ) from error

    return run


def _opens_log(set_writer, kind: str):
    """Megatron's, on the last rank, of a log in a folder or a service that may not be there."""

    @functools.wraps(set_writer)
    def run(args):
        try:
            set_writer(args)
        except Exception as error:
            folder = args.tensorboard_dir if kind == "tensorboard" else args.wandb_save_dir
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if kind == "wandb" and folder is None and args.save is None:
                reason = "neither --wandb-save-dir nor --save says where"
            flag = f"--tensorboard-dir {folder}" if kind == "tensorboard" else "--wandb-project"
            raise UserError(
                f"{flag}: its log cannot be begun ({reason}): mend that, or leave it out"
            ) from error

    return run


@functools.cache
def say_once(text: str) -> None:
    """On the first rank; Megatron may parse its arguments several times."""
    if os.environ.get("RANK", "0") == "0":
        print(f"> paradyse: {text}", flush=True)


def check_initialization(args: argparse.Namespace) -> None:
    """On GPUs: Megatron moves no model that it has initialised on the host."""
    if getattr(args, "paradyse", False) and args.use_cpu_initialization:
        raise UserError(
            "--use-cpu-initialization: Megatron 0.19 then leaves the model in the host's memory, "
            "and its first layer fails: leave it out"
        )


def complete(args: argparse.Namespace) -> list[str]:
    """Set arguments whose packages are missing, in place; the flags that say the same."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.fusions.fused_layer_norm import HAVE_FUSED_LAYER_NORM
    from megatron.core.tensor_parallel.layers import _grad_accum_fusion_available

    missing: dict[str, Any] = {}
    if not HAVE_TE:
        missing |= WITHOUT_ENGINE
    if not HAVE_FUSED_LAYER_NORM:
        missing |= WITHOUT_APEX
    if not _grad_accum_fusion_available:
        missing |= WITHOUT_GRADIENT_KERNEL
    if importlib.util.find_spec("scaled_masked_softmax_cuda") is None:
        missing |= WITHOUT_SOFTMAX_KERNEL
    if getattr(args, "async_save", False) and not _has_resiliency():
        missing |= WITHOUT_RESILIENCY
    changed = [name for name, value in missing.items() if getattr(args, name, value) != value]
    for name in changed:
        setattr(args, name, missing[name])
    return [FLAGS[name] for name in changed]


def _has_resiliency() -> bool:
    """Whether a nvidia-resiliency-ext is there that Megatron can save in the background with."""
    from megatron.core.dist_checkpointing.strategies.nvrx import has_nvrx_async_support

    try:
        return has_nvrx_async_support()
    except AssertionError:  # too old
        return False


def _short_warm_up(warm_up):
    """Megatron's warm-up of fused kernels, on tensors of the longest sequence [s, b, f/p]."""

    @functools.wraps(warm_up)
    def run(*arguments, **options):
        from megatron.training import get_args

        args = get_args()
        most = WARM_UP_POSITIONS * args.tensor_model_parallel_size
        if not getattr(args, "paradyse", False) or args.seq_length <= most:
            return warm_up(*arguments, **options)
        with other_values(args, seq_length=most):
            return warm_up(*arguments, **options)

    return run


@contextlib.contextmanager
def other_values(args: argparse.Namespace, **values: Any) -> Iterator[None]:
    """Megatron's arguments with these in the place of theirs, for a call of Megatron's."""
    own = {name: getattr(args, name) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(own)


def _norm_with_sequence_parallel(original_new):
    """WrappedTorchNorm.__new__ that tags parameters instead of refusing sequence parallelism."""

    def norm(cls, config, *args, **kwargs):
        if not config.sequence_parallel:
            return original_new(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        module = original_new(cls, plain, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = True  # Megatron then sums its gradient over the group
        return module

    return norm
