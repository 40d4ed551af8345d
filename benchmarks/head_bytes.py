"""Bytes of the loss head and of the embedding at lengths no CPU holds: fake tensors, one rank of p.

Every allocation of the real code is counted while it lives. It holds no numbers; nothing is sent.
What a kernel or a collective allocates for itself is not seen.
"""

from __future__ import annotations

import contextlib
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.head_rank import Head, make_layer
from megatron_paradyse.edges import cross_entropy
from megatron_paradyse.live_bytes import LiveBytes


@contextlib.contextmanager
def rank_of(p: int):
    """The last rank of p, in a group that moves nothing."""
    from megatron.core import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=p - 1, world_size=p)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=p)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_global_memory_buffer()
        dist.destroy_process_group()


def head_workspace_bytes(way: str, *, s: int, h: int, v: int, p: int, again: bool = False) -> int:
    """Peak of forward and backward, in bfloat16, beyond the input, its gradient and the weight.

    way: "tiles" or "megatron". again: the gradient of the losses is no multiple of the loss mask,
    so that tiles run again.
    """
    with rank_of(p), FakeTensorMode():
        layer = make_layer(h=h, v=v, p=p, tile=None, dtype=torch.bfloat16)
        x = torch.empty(s // p, 1, h, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(1, s, dtype=torch.int64)
        mask = torch.empty(1, s)
        head = Head(layer, x, labels, mask)
        factor = None if again else torch.ones(())
        meter = LiveBytes([x, layer.weight, labels, mask])
        # Whether the gradient is a multiple of the mask, fake numbers cannot say.
        with patch.object(cross_entropy, "_common_factor", lambda *a: factor), meter:
            head.run(way)
        return meter.peak_bytes - x.nbytes
