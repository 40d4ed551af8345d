"""METP: memory-efficient tensor parallelism. Blocks of weights go round; activations stay.

    attention   for each block of n/p heads: x [s/p, b, h] -> q, k, v -> ring attention
                -> its columns of proj -> total [s/p, b, h]
    mlp         for each block of f/p features: x -> fc1 -> activation -> fc2 columns -> total

The next block is under way while one is used. Only the block at hand has activations beyond
[s/p, b, h]; the backward computes them again. So nothing of length s, and no whole weight, exists
anywhere. From "METP" (Liang et al., Frontiers of Information Technology and Electronic
Engineering, 2025) as the ParaDySe paper describes it.

Bytes that a rank sends, e bytes a value (4 for what is summed in float32; 8 both if float64):

    attention  forward   (p-1)/p (A e + 2 s b g' d e) + S
               backward  (p-1)/p (A + 2 s b g' d) (e + 4) + S
    mlp        forward   (p-1)/p M e
               backward  (p-1)/p M (e + 4)

    A   values of qkv (aligned to whole heads: (n + 2 g') d h; with gates (2n + 2 g') d h), proj and
        the qkv bias
    M   values of fc1, fc2 and the fc1 bias
    g'  key/value heads over all blocks, lcm(g, p)
    S   s/p b h e if causal (swap_halves of input and output), else 0
    with p = 1 all is 0; with g % p != 0, aligning adds the rows that change ranks, once forward
    and twice (in e, and in 4) backward.
"""

from __future__ import annotations

from dataclasses import fields, replace

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    Microbatch,
    MlpShape,
    MlpWeights,
    Strategy,
    check_whole_heads,
)
from megatron_paradyse.strategies.metp_attention import CirculatingAttention
from megatron_paradyse.strategies.metp_mlp import CirculatingMlp
from megatron_paradyse.strategies.softmax_offset import whole_offset


def attention(
    x: Tensor,
    weights: AttentionWeights,
    shape: AttentionShape,
    microbatch: Microbatch,
    group: ProcessGroup,
) -> Tensor:
    """[s/p, b, h] -> [s/p, b, h]. Keeps x, the attention output [s/p, b, n d] and its lse."""
    weights = replace(weights, softmax_offset=whole_offset(weights, group))
    tensors = (getattr(weights, field.name) for field in fields(weights))
    return CirculatingAttention.apply(shape, microbatch, group, x, *tensors)


def mlp(x: Tensor, weights: MlpWeights, shape: MlpShape, group: ProcessGroup) -> Tensor:
    """[s/p, b, h] -> [s/p, b, h]. Keeps x."""
    return CirculatingMlp.apply(shape, group, x, weights.fc1, weights.fc2, weights.fc1_bias)


def check(shape: AttentionShape, p: int) -> None:
    """Each block needs whole query heads."""
    check_whole_heads("metp", shape, p)


STRATEGY = Strategy(
    name="metp",
    title="METP",
    attention=attention,
    mlp=mlp,
    check=check,
    tiled_mlp=mlp,  # which goes in blocks of features already
    takes_offset=True,
    takes_latents=True,
    takes_gate=True,
    takes_wide=True,
)
