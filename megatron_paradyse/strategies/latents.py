"""Attention over latents: queries, keys and values each linear in a few channels of a token.

The input of such an attention is [c_q, c_kv, c_pe]. Of each head

    q = [up c_q]        k = [up c_kv, c_pe]        v = up c_kv

where c_pe, the channels of a key that RoPE turns, are the same in all heads. From "DeepSeek-V2: A
Strong, Economical, and Efficient Mixture-of-Experts Language Model" (DeepSeek-AI, 2024), 2.1.

Kernels get heads of one size d, that of the widest of query, key and value; what is missing is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_paradyse.strategies.contract import AttentionShape, LatentSizes


def split_latents(x: Tensor, sizes: LatentSizes) -> tuple[Tensor, Tensor, Tensor]:
    """[..., i] -> c_q, c_kv and c_pe."""
    queries = x.shape[-1] - sizes.keys - sizes.positions
    c_q, c_kv, c_pe = x.split((queries, sizes.keys, sizes.positions), dim=-1)
    return c_q, c_kv, c_pe


def latent_heads(
    q: Tensor, kv: Tensor, c_pe: Tensor, sizes: LatentSizes, *, num_rotated: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The products of c_q and c_kv for m heads, and c_pe -> q, k and v, each [s, b, m, d].

    The channels that RoPE turns come first. Megatron has pairs (2i, 2i + 1) of them, strategies
    (i, i + num_rotated / 2).
    """
    content, positions, value = sizes.content, sizes.positions, sizes.value
    d = sizes.head_dim
    q = q.unflatten(-1, (-1, content + positions))
    k, v = kv.unflatten(-1, (-1, content + value)).split((content, value), dim=-1)
    of_queries = _paired(q[..., content:], num_rotated)
    of_keys = [part[:, :, None].expand(*k.shape[:3], -1) for part in _paired(c_pe, num_rotated)]
    missing = d - content - positions
    q = torch.cat((*of_queries, q[..., :content]), dim=-1)
    k = torch.cat((*of_keys, k), dim=-1)
    if missing:
        q, k = F.pad(q, (0, missing)), F.pad(k, (0, missing))
    return q, k, F.pad(v, (0, d - value)) if d > value else v.contiguous()


def _paired(channels: Tensor, num_rotated: int) -> list[Tensor]:
    """Of channels [..., positions]: the first and the second of each pair, and the others."""
    first, second = channels[..., :num_rotated:2], channels[..., 1:num_rotated:2]
    return [first, second, channels[..., num_rotated:]]


def of_values(out: Tensor, shape: AttentionShape) -> Tensor:
    """[s, b, n, d] -> the channels of values alone, where heads have more of them for queries."""
    return out if shape.latent is None else out[..., : shape.latent.value]
