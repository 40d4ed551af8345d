"""Vocabulary-parallel embedding in tiles: no [s, b, h] tensor exists, only the rank's share.

Megatron looks up [b, s, h] on every rank, most rows zero, before it scatters; its backward gathers
[s, b, h]. Here a tile is looked up and scattered at a time; the same bytes are sent.
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
        wide = torch.float64 if ctx.dtype == torch.float64 else torch.float32
        grad_weight = grad.new_zeros(ctx.shard, dtype=wide)
        for rows in tiles(grad.shape[0], grad.shape[1], p, tile=ctx.tile):
            index, held = _local(of_tile(tokens, rows, p), ctx.shard[0], ctx.group)
            gathered = all_gather(grad[rows], ctx.group).to(wide)  # [p t, b, h]
            gathered = gathered * held[..., None]
            grad_weight.index_add_(0, index.flatten(), gathered.flatten(0, 1))
            del gathered
        return None, grad_weight.to(ctx.dtype), None, None


def _local(tokens: Tensor, shard: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Rows of the rank's shard, 0 for tokens of other ranks, and whether it holds them."""
    local = tokens - group.rank() * shard
    held = (local >= 0) & (local < shard)
    return torch.where(held, local, 0), held
