"""One iteration of training as Megatron's train_step runs it, outside of its loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunState,
    get_rerun_state_machine,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args, training

from megatron_paradyse.profiler.model import ProfiledModel
from megatron_paradyse.profiler.operations import raw_batch
from megatron_paradyse.train.batch import meter as lengths
from megatron_paradyse.train.gpt import forward_step
from megatron_paradyse.train.packed_steps import run_packed


def train_one(model: ProfiledModel, seq_length: int, batch_size: int = 1) -> None:
    """On one microbatch of random documents, by the plan that the model's policy gives."""
    get_args().seq_length = seq_length
    _train_step(model, raw_batch(seq_length, batch_size), get_forward_backward_func())


def train_share(model: ProfiledModel, share: Any) -> None:
    """On a data/packed.py Share, as many microbatches as it has."""
    _train_step(model, share, functools.partial(run_packed, get_forward_backward_func()))


def _train_step(model: ProfiledModel, item: Any, schedule: Callable) -> None:
    """item: of the data iterator."""
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


def begin_anew(model: ProfiledModel) -> None:
    """After an iteration that an error has ended."""
    get_rerun_state_machine().state = RerunState.NOT_RUNNING_YET
    lengths.take()
    forget_gradients(model)


def forget_gradients(model: ProfiledModel) -> None:
    """What a failure may have left in gradients, and in layers whose forward did not end.

    Megatron's layer keeps the input of its MLP until that has run, and with it, by autograd, what
    all layers before have saved.
    """
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            parameter.grad = None
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                module.mlp_norm_manager = None
        chunk.zero_grad_buffer()
    torch.cuda.empty_cache()
