"""LocalZ: each document's attention on the one rank that holds it; weights by ZeRO-3.

    attention   x [s/p, b, h] -> qkv of all heads [s/p, b, n] -> attention -> proj
    mlp         zero_mlp

No key leaves its rank: only weights are communicated. Runs packed documents of which none is on
two ranks, and anything with p = 1.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies.blocks import contiguous_spans
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    Microbatch,
    Strategy,
    check_layout,
    documents_stay,
)
from megatron_paradyse.strategies.latents import of_values
from megatron_paradyse.strategies.local_attention import AttentionTask, local_attention
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
    """[s/p, b, h] -> [s/p, b, h]. Communicates weights only; keeps x, q, k, v and the output."""
    p, rank = group.size(), group.rank()
    if not documents_stay(microbatch, p):
        raise UserError(
            f"local_z needs every document on one of the p={p} ranks: use megatron_cz, "
            "or pack documents that each fit into a shard"
        )
    spans = contiguous_spans(microbatch, p, rank)
    q, k, v, gate = zero_qkv(x, weights, shape, microbatch, group, spans=spans)
    proj = gather_weight(weights.proj.t(), group)
    task, offset = AttentionTask(shape, microbatch), whole_offset(weights, group)
    out = local_attention(q, k, v, spans=spans, task=task, offset=offset)
    del q, k, v
    return zero_proj(of_values(out, shape), proj, weights, group, gate=gate)


STRATEGY = Strategy(
    name="local_z",
    title="LocalZ",
    attention=attention,
    mlp=zero_mlp,
    check=check_layout,
    takes=documents_stay,
    tiled_mlp=zero_mlp_in_tiles,
    takes_offset=True,
    takes_latents=True,
    takes_gate=True,
)
