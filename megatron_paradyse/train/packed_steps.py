"""Runs as many microbatches in a step as its global batch was packed into.

Megatron's loop counts documents, as without packing: consumed samples, the learning rate's schedule
and the log follow get_num_microbatches(), which does not change. Only the schedule of forward and
backward passes runs another number, the same on every replica and pipeline stage; while it runs,
get_num_microbatches() says so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from megatron.core import num_microbatches_calculator as calculator
from megatron.training import training

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
    try:
        yield
    finally:
        counter.num_micro_batches = documents
