"""The attention kernel that runs anywhere: plain torch operations, one tile of queries at a time.

It handles what the fused kernels do not: hashed attention dropout, float64 on CUDA, odd head dims,
and a sliding window where the flash kernels do not run (float32, CPU). Scores and softmax are
computed in float32 (float64 for float64 inputs); the largest buffer is [b, n, TILE, sk], so that
memory stays linear in the sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_paradyse.strategies.dropout import keep_mask_of_ranges

TILE = 64


@dataclass(frozen=True)
class BlockRule:
    """How one rectangle of scores is masked and where it lies in the whole score matrix."""

    scale: float
    causal: bool = False  # queries and keys are the same range; a query sees keys up to itself
    window: int | None = None
    q_start: int = 0
    k_start: int = 0
    dropout: float = 0.0
    dropout_seed: int = 0
    first_sequence: int = 0
    first_head: int = 0
    parts: tuple[tuple[int, int], ...] = ()  # of many documents: rows of queries and keys of each


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, rule: BlockRule) -> tuple[Tensor, Tensor]:
    """q [b, n, sq, d], k and v [b, g, sk, d] -> out [b, n, sq, d], lse [b, n, sq].

    A query that sees no key gets out 0 and lse -inf.
    """
    k, v = _wide(k), _wide(v)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=k.dtype)
    for rows, keys in _tiles(q.shape[2], k.shape[2], rule):
        scores = _scores(q[:, :, rows], k[:, :, keys], rule, rows, keys)
        tile_lse = scores.logsumexp(-1)
        lse[:, :, rows] = tile_lse
        probs = _probabilities(scores, tile_lse)
        del scores
        keep = _keep(probs, rule, rows, keys)
        if keep is not None:
            probs = probs * keep
        out[:, :, rows] = per_query_head(probs, v[:, :, keys])
        del probs, keep  # before the next tile's come
    return out, lse


def tiled_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: BlockRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given the out and lse over all keys, not only this block's.

    With P the probabilities, M the scaled dropout mask and D = rowsum(grad_out out):
    dV = (P M)^T dO,  dS = P (M dO V^T - D),  dQ = scale dS K,  dK = scale dS^T Q.
    """
    wide_k, wide_v = _wide(k), _wide(v)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for rows, keys in _tiles(q.shape[2], k.shape[2], rule):
        k_tile, v_tile = wide_k[:, :, keys], wide_v[:, :, keys]
        q_tile, grad_tile = _wide(q[:, :, rows]), _wide(grad_out[:, :, rows])
        probs = _probabilities(_scores(q_tile, k_tile, rule, rows, keys), lse[:, :, rows])
        grad_probs = per_query_head(grad_tile, v_tile.transpose(-1, -2))
        keep = _keep(probs, rule, rows, keys)
        if keep is not None:
            grad_probs *= keep
        grad_v[:, :, keys] += per_kv_head(
            probs if keep is None else probs * keep, grad_tile, v_tile
        )
        delta = (grad_tile * _wide(out[:, :, rows])).sum(-1, keepdim=True)
        grad_scores = probs * (grad_probs - delta) * rule.scale
        grad_q[:, :, rows] = per_query_head(grad_scores, k_tile)
        grad_k[:, :, keys] += per_kv_head(grad_scores, q_tile, k_tile)
        del probs, grad_probs, keep, grad_scores
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _tiles(sq: int, sk: int, rule: BlockRule):
    """Slices of query rows, each with the slice of keys that any of them may see."""
    offset = rule.q_start - rule.k_start
    for first in range(0, sq, TILE):
        last = min(first + TILE, sq)
        stop = last if rule.causal else sk
        start = 0 if rule.window is None else max(0, first + offset - rule.window + 1)
        start = min(start, stop - 1)  # at least one key, to keep every reduction defined
        yield slice(first, last), slice(start, stop)


def _scores(q: Tensor, k: Tensor, rule: BlockRule, rows: slice, keys: slice) -> Tensor:
    scores = per_query_head(_wide(q), k.transpose(-1, -2)) * rule.scale
    hide_(scores, rule, rows, keys)
    return scores


def hide_(scores: Tensor, rule: BlockRule, rows: slice, keys: slice) -> None:
    """Set the scores [..., rows, keys] that the block's causal or window mask hides to -inf."""
    if not rule.causal and rule.window is None:
        return
    q_position = torch.arange(rows.start, rows.stop, device=scores.device) + rule.q_start
    k_position = torch.arange(keys.start, keys.stop, device=scores.device) + rule.k_start
    distance = q_position[:, None] - k_position
    hidden = distance < 0 if rule.causal else torch.zeros_like(distance, dtype=torch.bool)
    if rule.window is not None:
        hidden |= distance >= rule.window
    scores.masked_fill_(hidden, float("-inf"))


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in rows that see nothing (lse -inf)."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), float("inf"))[..., None])


def _keep(probs: Tensor, rule: BlockRule, rows: slice, keys: slice) -> Tensor | None:
    """The dropout mask scaled by 1 / (1 - dropout), or None."""
    if rule.dropout == 0.0:
        return None
    b, n = probs.shape[:2]
    keep = keep_mask_of_ranges(
        rule.dropout_seed,
        sequences=range(rule.first_sequence, rule.first_sequence + b),
        heads=range(rule.first_head, rule.first_head + n),
        queries=range(rule.q_start + rows.start, rule.q_start + rows.stop),
        keys=range(rule.k_start + keys.start, rule.k_start + keys.stop),
        dropout=rule.dropout,
        device=probs.device,
    )
    return keep.to(probs.dtype) / (1.0 - rule.dropout)


def per_query_head(x: Tensor, y: Tensor) -> Tensor:
    """[b, n, t, i] x [b, g, i, j] -> [b, n, t, j]: each group of n/g heads shares one y."""
    b, n, t, _ = x.shape
    g = y.shape[1]
    return (x.reshape(b, g, n // g * t, x.shape[3]) @ y).view(b, n, t, y.shape[3])


def per_kv_head(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """[b, n, t, k]^T x [b, n, t, d] -> [b, g, k, d], summed over each group of n/g heads."""
    b, n, t, _ = x.shape
    g = like.shape[1]
    x, y = (z.reshape(b, g, n // g * t, z.shape[3]) for z in (x, y))
    return x.transpose(-1, -2) @ y
