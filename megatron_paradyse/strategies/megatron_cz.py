"""MegatronCZ: context parallelism (ring attention over sequence shards); weights by ZeRO-3.

    attention   x [s/p, b, h] -> qkv of all heads [s/p, b, n] -> ring attention -> proj
    mlp         zero_mlp

Causal attention over contiguous chunks would give the last rank most of the work. So rank r swaps
the second half of its chunk with rank p-1-r before the attention and back after it: the rank then
holds an early and a late half chunk, and at every step of the ring every rank has the same work.
Of packed documents (Microbatch.shards), and where a sliding window is narrow (sizes.is_narrow),
nothing is swapped, and keys and values go straight to the ranks whose queries see them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies.blocks import ring_spans, swaps_halves
from megatron_paradyse.strategies.collectives import swap_halves, swap_halves_back
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    Microbatch,
    Strategy,
    check_layout,
)
from megatron_paradyse.strategies.latents import of_values
from megatron_paradyse.strategies.local_attention import AttentionTask
from megatron_paradyse.strategies.ring_attention import ring_attention
from megatron_paradyse.strategies.softmax_offset import whole_offset
from megatron_paradyse.strategies.zero import gather_weight, zero_mlp, zero_proj, zero_qkv
from megatron_paradyse.strategies.zero_tiles import zero_mlp_in_tiles


def attention(
    x: Tensor,
    weights: AttentionWeights,
    shape: AttentionShape,
    microbatch: Microbatch,
    group: ProcessGroup,
) -> Tensor:
    """[s/p, b, h] -> [s/p, b, h]. Besides weights, k and v go round the ring.

    When causal, half of x and half of the output change ranks: swapping [s/p, b, h] at both ends
    of the layer's attention costs no more than swapping q, k, v and the output around the ring.
    """
    ring = microbatch.sequence_group(group)
    p, rank = ring.size(), ring.rank()
    spans_of_ranks = ring_spans(shape, microbatch, p)
    swaps = swaps_halves(shape, microbatch, p)
    if swaps:
        x = swap_halves(x, group)
    q, k, v, gate = zero_qkv(x, weights, shape, microbatch, group, spans=spans_of_ranks[rank])
    proj = gather_weight(weights.proj.t(), group)
    kv = torch.stack((k, v))
    del k, v
    out = ring_attention(
        q,
        kv,
        spans_of_ranks=spans_of_ranks,
        task=AttentionTask(shape, microbatch),
        group=ring,
        offset=whole_offset(weights, group),
    )
    y = zero_proj(of_values(out, shape), proj, weights, group, gate=gate)
    return swap_halves_back(y, group) if swaps else y


STRATEGY = Strategy(
    name="megatron_cz",
    title="MegatronCZ",
    attention=attention,
    mlp=zero_mlp,
    check=check_layout,
    tiled_mlp=zero_mlp_in_tiles,
    takes_offset=True,
    takes_latents=True,
    takes_gate=True,
    takes_wide=True,
)
