"""Runs as many microbatches in a step as its global batch was packed into.

Megatron's loop counts documents, as without packing: consumed samples, the learning rate's schedule
and the log follow get_num_microbatches(), which does not change. Only the schedule of forward and
backward passes runs another number, the same on every replica and pipeline stage; while it runs,
get_num_microbatches() says so. What the log divides by that number afterwards is scaled to it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from megatron.core import num_microbatches_calculator as calculator
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import training
from torch import Tensor

from megatron_paradyse.train.packed_batch import PackedStep


def install() -> None:
    """Wrap the schedules where Megatron's training and evaluation look them up."""
    get_schedule = training.get_forward_backward_func

    @functools.wraps(get_schedule)
    def get_packed_schedule(*args, **kwargs):
        return functools.partial(run_packed, get_schedule(*args, **kwargs))

    training.get_forward_backward_func = get_packed_schedule


def run_packed(schedule, *, data_iterator, num_microbatches: int, **kwargs) -> Any:
    """The schedule on the next global batch of the iterator, of one of each model chunk."""
    chunks = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    steps = [PackedStep(shares) for shares in chunks]
    count = len(steps[0])
    with _counted(count):
        return schedule(
            data_iterator=steps if isinstance(data_iterator, list) else steps[0],
            num_microbatches=count,
            **kwargs,
        )


@contextlib.contextmanager
def _counted(count: int) -> Iterator[None]:
    counter = calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    documents = counter.num_micro_batches
    counter.num_micro_batches = count
    before = {name: sums.clone() for name, sums in _sums_over_microbatches().items()}
    try:
        yield
    finally:
        counter.num_micro_batches = documents
    for name, sums in _sums_over_microbatches().items():
        of_step = sums - before[name] if name in before else sums.clone()
        sums += of_step * (documents / count - 1)


def _sums_over_microbatches() -> dict[str, Tensor]:
    """Of each layer, for the log: losses of multi-token prediction, what experts record."""
    sums = {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
    losses = MTPLossLoggingHelper.tracker.get("loss_values")
    return sums if losses is None else {**sums, "multi-token prediction": losses}
