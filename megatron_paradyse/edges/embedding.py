"""Embeddings in tiles of the sequence: no [s, b, h] tensor exists, only the rank's share.

Megatron looks up words in [b, s, h] on every rank, most rows zero, before it scatters, and every
position on every rank; its backward gathers [s, b, h]. Here a tile is looked up and scattered at a
time, and only the rank's own positions. The same bytes are sent, forward and backward together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron_paradyse.edges.tiles import of_tile, tiles
from megatron_paradyse.strategies.collectives import all_gather, reduce_scatter
from megatron_paradyse.strategies.local_attention import accumulation_dtype


def tiled_embedding(tokens: Tensor, weight: Tensor, group: ProcessGroup, *, tile: int) -> Tensor:
    """tokens [b, s], weight [v/p, h] -> [s/p, b, h], the rows of the rank's chunk.

    Keeps tokens. Backward: the whole gradient of the rank's shard, summed in float32. Sends
    (p-1) s/p b h values, both ways. tile: at most so many tokens' rows exist beyond the result.
    """
    return _TiledEmbedding.apply(tokens, weight, group, tile)


class _TiledEmbedding(Function):
    @staticmethod
    def forward(ctx, tokens, weight, group, tile):
        ctx.save_for_backward(tokens)
        ctx.group, ctx.tile, ctx.shard, ctx.dtype = group, tile, weight.shape, weight.dtype
        p, (b, s) = group.size(), tokens.shape
        out = weight.new_empty(s // p, b, weight.shape[1])
        for rows in tiles(s // p, b, p, tile=tile):
            index, held = _local(of_tile(tokens, rows, p), weight.shape[0], group)
            found = F.embedding(index, weight)  # [p t, b, h]
            out[rows] = reduce_scatter(found.mul_(held[..., None]), group)
            del found
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (tokens,) = ctx.saved_tensors
        p = ctx.group.size()
        wide = accumulation_dtype(ctx.dtype)
        grad_weight = grad.new_zeros(ctx.shard, dtype=wide)
        for rows in tiles(grad.shape[0], grad.shape[1], p, tile=ctx.tile):
            index, held = _local(of_tile(tokens, rows, p), ctx.shard[0], ctx.group)
            gathered = all_gather(grad[rows], ctx.group).to(wide)  # [p t, b, h]
            gathered = gathered * held[..., None]
            grad_weight.index_add_(0, index.flatten(), gathered.flatten(0, 1))
            del gathered
        return None, grad_weight.to(ctx.dtype), None, None


def tiled_positions(
    positions: Tensor, weight: Tensor, group: ProcessGroup, *, tile: int, restart: bool = False
) -> Tensor:
    """positions [b, s], weight [m, h], which every rank holds -> [s/p, b, h], its chunk's rows.

    restart: positions begin anew within a sequence, as those of packed documents do. Backward: the
    whole gradient of the weight on every rank, summed in float32 (float64) with restart, else in
    the weight's dtype: a row then takes part once per sequence of the batch. Sends (p-1) s/p b h
    values backward.
    """
    sum_dtype = accumulation_dtype(weight.dtype) if restart else weight.dtype
    return _TiledPositions.apply(positions, weight, group, tile, sum_dtype)


class _TiledPositions(Function):
    @staticmethod
    def forward(ctx, positions, weight, group, tile, sum_dtype):
        ctx.save_for_backward(positions)
        ctx.group, ctx.tile, ctx.shape, ctx.dtype = group, tile, weight.shape, weight.dtype
        ctx.sum_dtype = sum_dtype
        own = positions.chunk(group.size(), dim=1)[group.rank()]
        return F.embedding(own.t(), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (positions,) = ctx.saved_tensors
        p = ctx.group.size()
        grad_weight = grad.new_zeros(ctx.shape, dtype=ctx.sum_dtype)
        for rows in tiles(grad.shape[0], grad.shape[1], p, tile=ctx.tile):
            index = of_tile(positions, rows, p).flatten()
            gathered = all_gather(grad[rows], ctx.group).to(ctx.sum_dtype)  # [p t, b, h]
            grad_weight.index_add_(0, index, gathered.flatten(0, 1))
            del gathered
        return None, grad_weight.to(ctx.dtype), None, None, None


def _local(tokens: Tensor, shard: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Rows of the rank's shard, 0 for tokens of other ranks, and whether it holds them."""
    local = tokens - group.rank() * shard
    held = (local >= 0) & (local < shard)
    return torch.where(held, local, 0), held
