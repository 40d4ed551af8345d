"""One iteration of training on one document, as Megatron's loop runs it."""

from __future__ import annotations


def train_one(model, length: int) -> None:
    """model: profiler.model.ProfiledModel, its policy's chosen plan included; s = length, b = 1."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import get_args, training

    from megatron_paradyse.profiler.operations import raw_batch
    from megatron_paradyse.train.batch import meter as lengths
    from megatron_paradyse.train.gpt import forward_step

    get_args().seq_length = length
    training.train_step(
        forward_step,
        RerunDataIterator(iter([raw_batch(length, 1)])),
        model.chunks,
        model.optimizer,
        model.scheduler,
        model.config,
        get_forward_backward_func(),
        iteration=0,
    )
    lengths.take()
