"""Attention of a rank's heads, where ranks of a group split heads and each has all its tokens.

Of a wide microbatch these are a part of the tokens: keys and values of the same heads come from the
ranks at the same place of the other groups, as between the ranks of a ring. So a token's keys reach
a group once, divided among its ranks, where rings among all ranks bring them to each. Two
dimensions, as in "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI"
(Fang and Zhao, 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_paradyse.strategies.blocks import group_spans, whole
from megatron_paradyse.strategies.local_attention import AttentionTask, local_attention
from megatron_paradyse.strategies.ring_attention import ring_attention


def head_attention(
    q: Tensor, k: Tensor, v: Tensor, *, task: AttentionTask, offset: Tensor | None
) -> Tensor:
    """q [s, b, n/p, d], k and v [s, b, m, d] -> [s, b, n/p, d], in the order of positions.

    Of a wide microbatch s is what its groups have each.
    """
    microbatch, wide = task.microbatch, task.microbatch.wide
    if wide is None:
        return local_attention(q, k, v, spans=whole(microbatch), task=task, offset=offset)
    return ring_attention(
        q.contiguous(),  # it may be a view of what keys and values are a part of too
        torch.stack((k, v)),
        spans_of_ranks=tuple(group_spans(microbatch, i) for i in range(wide.peers.size())),
        task=task,
        group=wide.peers,
        offset=offset,
    )
