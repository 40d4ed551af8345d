"""Rows of ranks in the order of positions, and what that holds."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.strategies.order import to_positions, to_rows
from megatron_paradyse.strategies.walks.steps import INDEX_BYTES
from tests.packing.rows import zigzag


def test_fake_queries_keys_values_and_outputs_share_indices_as_real_ones_do():
    """Of each token two, until nothing needs them any more."""
    s = 64
    microbatch = microbatch_of(zigzag((s,), 2))
    with FakeTensorMode(), LiveBytes() as meter:
        q, k, v = (torch.empty(s, 4, requires_grad=True) for _ in range(3))
        before = meter.live_bytes
        ordered = [to_positions(x, microbatch) for x in (q, k, v)]
        out = to_rows(sum(ordered), microbatch)
        del ordered
        assert meter.live_bytes - before == out.nbytes + 2 * INDEX_BYTES * s
        out.sum().backward()
        del out
        assert meter.live_bytes - before == sum(x.grad.nbytes for x in (q, k, v))
