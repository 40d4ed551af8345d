"""What benchmarks on real ranks share: their start, and one iteration on one document."""

from __future__ import annotations

import functools
import os
import sys


def start_rank():
    """Megatron's arguments, from the model's flags on the command line, and its groups."""
    from megatron_paradyse.profiler.flags import megatron_flags
    from megatron_paradyse.train import plugin

    sys.argv[1:] = megatron_flags(
        sys.argv[1:], model_path=None, ranks=int(os.environ["WORLD_SIZE"])
    )
    plugin.install()
    from megatron.training import training
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    training.initialize_megatron()
    args.check_for_nan_in_loss_and_grad = False  # its check wants to run inside train_step
    return args


def train_one(model, length: int) -> None:
    """model: profiler.model.ProfiledModel, its policy's chosen plan included; s = length, b = 1."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training import get_args

    from megatron_paradyse.profiler.operations import raw_batch

    get_args().seq_length = length
    _train_step(model, raw_batch(length, 1), get_forward_backward_func())


def train_share(model, share) -> None:
    """One iteration on a data/packed.py Share, as many microbatches as it has."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_paradyse.train.packed_steps import run_packed

    _train_step(model, share, functools.partial(run_packed, get_forward_backward_func()))


def _train_step(model, item, schedule) -> None:
    """item: of the data iterator."""
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import training

    from megatron_paradyse.train.batch import meter as lengths
    from megatron_paradyse.train.gpt import forward_step

    training.train_step(
        forward_step,
        RerunDataIterator(iter([item])),
        model.chunks,
        model.optimizer,
        model.scheduler,
        model.config,
        schedule,
        iteration=0,
    )
    lengths.take()
