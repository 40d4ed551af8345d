"""Gradient buckets are reduced in one order on all replicas, whatever their plans.

With --overlap-grad-reduce Megatron begins to reduce a bucket when its last gradient is there. One
strategy gives the gradients of a half of a layer together and another one after the other, so that
replicas whose plans differ would begin their collectives in different orders. Here a bucket that
is ready waits for those before it in Megatron's own order, which is that of the backward.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def install() -> None:
    """Before Megatron's DistributedDataParallel is made."""
    from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer

    groups = param_and_grad_buffer._ParamAndGradBucketGroup
    wrapper: Any = distributed_data_parallel.DistributedDataParallel
    wrapper.__init__ = _knowing_neighbours(wrapper.__init__)
    groups.start_grad_sync = _in_order(groups.start_grad_sync)
    groups.reset = _forgetting(groups.reset)


def _knowing_neighbours(make):
    @functools.wraps(make)
    def init(self, *args, **kwargs):
        make(self, *args, **kwargs)
        for in_order in (self.bucket_groups, self.expert_parallel_bucket_groups):
            for group in in_order:
                group.in_order, group.ready, group.has_begun = in_order, None, False

    return init


def _in_order(start):
    @functools.wraps(start)
    def start_in_order(self, *args, **kwargs):
        in_order = getattr(self, "in_order", None)
        # Megatron itself begins those of the first batch in order, and without overlap all.
        if in_order is None or self.is_first_batch or not self.ddp_config.overlap_grad_reduce:
            return start(self, *args, **kwargs)
        self.ready = (args, kwargs)
        for group in in_order:
            if group.ready is None:
                break
            if not group.has_begun:
                group.has_begun = True
                start(group, *group.ready[0], **group.ready[1])
        return None

    return start_in_order


def _forgetting(reset):
    @functools.wraps(reset)
    def reset_order(self, *args, **kwargs):
        self.ready, self.has_begun = None, False
        return reset(self, *args, **kwargs)

    return reset_order
