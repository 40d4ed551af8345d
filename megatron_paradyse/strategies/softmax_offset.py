"""A softmax with one more key, which has a logit for each head and no value.

Megatron's --softmax-type learnable, whose logits are parameters, and off-by-one, where they are 0.
Given attention over the keys there are, by its output and log-sum-exp, the whole is

    out' = sigmoid(lse - offset) out        lse' = logaddexp(lse, offset)

and the gradients of q, k and v are what any kernel's backward makes of out' and lse'. The gradient
of a head's offset is -exp(offset - lse') rowsum(grad_out out'), summed over its queries.

Layouts: out, grad_out [sq, b, n, d]; lse [b, n, sq] and offset [n] in the accumulation dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_paradyse.strategies.collectives import gather_sequence
from megatron_paradyse.strategies.contract import AttentionWeights


def in_float(offset: Tensor | None) -> Tensor | None:
    """In the accumulation dtype: float32, or float64."""
    if offset is None or offset.dtype == torch.float64:
        return offset
    return offset.float()


def whole_offset(weights: AttentionWeights, group: ProcessGroup) -> Tensor | None:
    """Of all n heads. Sends (p-1) n/p values in 4 bytes, both ways."""
    offset = in_float(weights.softmax_offset)
    return None if offset is None else gather_sequence(offset, group)


def with_offset_(out: Tensor, lse: Tensor, offset: Tensor | None) -> Tensor:
    """out becomes out', in place; returns lse'. Where no key is seen, out stays 0."""
    if offset is None:
        return lse
    weight = torch.sigmoid(lse - offset[:, None])
    out.mul_(weight.permute(2, 0, 1)[..., None])  # [b, n, sq] -> [sq, b, n, 1]
    return torch.logaddexp(lse, offset[:, None])


def offset_gradient(
    grad_out: Tensor, out: Tensor, lse: Tensor, offset: Tensor | None
) -> Tensor | None:
    """Of the rank's queries: [n]; out and lse are with_offset_'s. Head by head: small buffers."""
    if offset is None:
        return None
    total = torch.empty_like(offset)
    for head in range(len(offset)):
        row_sums = (grad_out[:, :, head].to(lse.dtype) * out[:, :, head]).sum(-1)  # [sq, b]
        share = torch.exp(offset[head] - lse[:, head])  # [b, sq]
        total[head] = -(share.t() * row_sums).sum()
    return total
