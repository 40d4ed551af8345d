"""Attention over latents: queries, keys and values each linear in a few channels of a token.

The input of such an attention is [c_q, c_kv, c_pe]. Of each head

    q = [up c_q]        k = [up c_kv, c_pe]        v = up c_kv

where c_pe, the channels of a key that RoPE turns, are the same in all heads. From "DeepSeek-V2: A
Strong, Economical, and Efficient Mixture-of-Experts Language Model" (DeepSeek-AI, 2024), 2.1.

Kernels get heads of one size d, that of the widest of query, key and value; what is missing is 0.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

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
    (i, i + num_rotated / 2). Keeps nothing.
    """
    return _Heads.apply(q, kv, c_pe, sizes, num_rotated)


class _Heads(Function):
    """Every channel of a head is that of a product or of c_pe at another place, or 0."""

    @staticmethod
    def forward(ctx, q, kv, c_pe, sizes, num_rotated):
        ctx.sizes, ctx.num_rotated = sizes, num_rotated
        moved, d = _moved(sizes, num_rotated), sizes.head_dim
        q = q.unflatten(-1, (-1, sizes.content + sizes.positions))
        kv = kv.unflatten(-1, (-1, sizes.content + sizes.value))
        of_q, of_k, of_v = (_room(q, used, d) for used in (q.shape[-1], q.shape[-1], sizes.value))
        for source, target in moved.of_queries:
            of_q[..., target] = q[..., source]
        for source, target in moved.of_keys:
            of_k[..., target] = kv[..., source]
        for source, target in moved.of_positions:
            of_k[..., target] = c_pe[:, :, None, source]
        for source, target in moved.of_values:
            of_v[..., target] = kv[..., source]
        return of_q, of_k, of_v

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_q, grad_k, grad_v):
        sizes, moved = ctx.sizes, _moved(ctx.sizes, ctx.num_rotated)
        s, b, m, _ = grad_q.shape
        of_q = grad_q.new_empty(s, b, m, sizes.content + sizes.positions)
        of_kv = grad_q.new_empty(s, b, m, sizes.content + sizes.value)
        of_pe = grad_q.new_empty(s, b, sizes.positions)
        for source, target in moved.of_queries:
            of_q[..., source] = grad_q[..., target]
        for source, target in moved.of_keys:
            of_kv[..., source] = grad_k[..., target]
        for source, target in moved.of_values:
            of_kv[..., source] = grad_v[..., target]
        summed = grad_k[..., : sizes.positions].sum(2)
        for source, target in moved.of_positions:
            of_pe[..., source] = summed[..., target]
        return of_q.flatten(2), of_kv.flatten(2), of_pe, None, None


def _room(like: Tensor, used: int, d: int) -> Tensor:
    """Of as many heads, [s, b, m, d], 0 beyond the channels that will be used."""
    room = like.new_empty(*like.shape[:-1], d)
    if used < d:
        room[..., used:] = 0
    return room


class _Moved(NamedTuple):
    """Channels of a product, or of c_pe, and of a head."""

    of_queries: list[tuple[slice, slice]]
    of_keys: list[tuple[slice, slice]]
    of_positions: list[tuple[slice, slice]]
    of_values: list[tuple[slice, slice]]


@functools.cache
def _moved(sizes: LatentSizes, num_rotated: int) -> _Moved:
    content, positions, half = sizes.content, sizes.positions, num_rotated // 2
    contents = [(slice(0, content), slice(positions, positions + content))]

    def rotated(first: int) -> list[tuple[slice, slice]]:
        turned, stop = first + num_rotated, first + positions
        pairs = [
            (slice(first, turned, 2), slice(0, half)),
            (slice(first + 1, turned, 2), slice(half, num_rotated)),
        ]
        still = [(slice(turned, stop), slice(num_rotated, positions))]
        return pairs + (still if turned < stop else [])

    return _Moved(
        of_queries=[*rotated(content), *contents],
        of_keys=contents,
        of_positions=rotated(0),
        of_values=[(slice(content, content + sizes.value), slice(0, sizes.value))],
    )


def of_values(out: Tensor, shape: AttentionShape) -> Tensor:
    """[s, b, n, d] -> the channels of values alone, where heads have more of them for queries."""
    return out if shape.latent is None else out[..., : shape.latent.value]
