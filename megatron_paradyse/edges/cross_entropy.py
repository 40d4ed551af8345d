"""Vocabulary-parallel output layer and cross-entropy in tiles: no [s, b, v/p] tensor exists.

Per tile the rank gathers the rows of every rank, multiplies by its shard of the weight and takes
the softmax of what it has; ranks exchange its log-sum-exp and the label's logit, 2 numbers a token.

When are the gradients computed? Those of a tile need its logits, and computing logits again adds a
third to the head's FLOPs. But the gradient g [b, s] of the losses is known only in the backward:

    grad_x[i]   = g[i] (softmax[i] - onehot[i]) W              g[i] may come later
    grad_weight = sum_i g[i] (softmax[i] - onehot[i])' x[i]    here it may not

In training g = c m: the loss mask m is known beforehand, and one number c (the reciprocal of the
number of tokens, the loss scale) later. Given m as token_weights, the forward computes both
gradients for g = m and drops the logits, and the backward multiplies by c: the arithmetic of an
untiled head, with one gather of x instead of two. The backward looks at g first. If it is no
multiple of m, the forward's gradients are thrown away and all tiles run again with g itself,
exactly; so too without token_weights, and in float16, whose small probabilities need the loss scale
before they are rounded.

Where only some tokens count, as of conversations, the others are gathered with their tile, and no
logit of them is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron_paradyse.edges.tiles import RowBytes, counted_tiles, of_tile, put_tile, tiles
from megatron_paradyse.edges.weight_sum import WeightSum
from megatron_paradyse.strategies.collectives import (
    Pending,
    all_gather,
    all_gather_async,
    reduce_scatter_async,
)
from megatron_paradyse.strategies.host import to_device
from megatron_paradyse.strategies.local_attention import accumulation_dtype

ROUNDINGS = 4  # of g = c m: how far it may be from a multiple of m, in roundings of its dtype


def tiled_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: ProcessGroup,
    *,
    tile: int,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    take_weight_gradient: Callable[[Tensor], Tensor | None] | None = None,
    predicted: Tensor | None = None,
    counted: Tensor | None = None,
    logits_scale: float = 1.0,
) -> Tensor:
    """x [s/p, b, h], weight [v/p, h], bias [v/p], labels [b, s] -> losses [b, s].

    Losses are in float32 at least. tile: at most so many tokens' logits exist at a time.
    token_weights [b, s]: what the gradient of the losses will be a multiple of.
    take_weight_gradient: gets the weight's gradient, in float32 at least if it is of several tiles,
    and returns the one for autograd (default: in the weight's dtype).
    predicted [b, s] int64: filled with each token's likeliest label.
    counted [b, s] bool: losses of other tokens are 0, without a gradient. Waits for the device.
    logits_scale: logits are so many times x times weight plus bias, as with --use-mup.

    Backward: grad_x [s/p, b, h] and the whole gradient of the rank's shard. Sends (p-1) s/p b h
    values for x, as many for its gradient, and 2 (p-1) s b for the softmax (with predicted 2 more);
    when tiles run again, x and the softmax once more. Holds, besides x and its gradient, the tile's
    buffers and, from forward to backward, the gradient of the weight in float32. (Of a single tile
    of counted tokens in its dtype: no more than an untiled head needs in its backward.)
    """
    take_weight_gradient = take_weight_gradient or (lambda grad: grad.to(weight.dtype))
    chosen = (
        None if counted is None else list(_chosen_tiles(x, weight, counted, group.size(), tile))
    )
    head = _Head(group, tile, take_weight_gradient, predicted, chosen, logits_scale)
    wanted = torch.is_grad_enabled() and token_weights is not None and x.dtype != torch.float16
    return _TiledCrossEntropy.apply(
        x, weight, bias, labels, token_weights if wanted else None, head
    )


@dataclass(frozen=True)
class _Head:
    group: ProcessGroup
    tile: int
    take_weight_gradient: Callable[[Tensor], Tensor | None]
    predicted: Tensor | None
    chosen: list[tuple[slice, Tensor | None]] | None  # tiles, which of their rows; None: all
    logits_scale: float

    def tiles(self, x: Tensor) -> Iterator[tuple[slice, Tensor | None]]:
        if self.chosen is not None:
            return iter(self.chosen)
        slices = tiles(x.shape[0], x.shape[1], self.group.size(), tile=self.tile)
        return ((rows, None) for rows in slices)


def _chosen_tiles(x, weight, counted, p: int, tile: int) -> Iterator[tuple[slice, Tensor | None]]:
    row = RowBytes.of(h=x.shape[-1], vocab_shard=len(weight), element_bytes=x.itemsize)
    for rows, chosen in counted_tiles(counted.cpu().numpy(), p, tile=tile, row=row):
        all_count = len(chosen) == (rows.stop - rows.start) * p * len(counted)
        yield rows, None if all_count else to_device(chosen, x.device)


@dataclass
class _Gradients:
    """For losses weighted by token_weights; None where not needed."""

    x: Tensor | None
    weight: WeightSum | None
    bias: Tensor | None


class _TiledCrossEntropy(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, labels, token_weights, head):
        losses = labels.new_empty(labels.shape, dtype=accumulation_dtype(x.dtype))
        ctx.head, ctx.at_once = head, None
        ctx.save_for_backward(x, weight, bias, labels, token_weights)
        gradients = None
        if token_weights is not None and any(ctx.needs_input_grad[:3]):
            gradients = _new_gradients(x, weight, bias, ctx.needs_input_grad, head)
        _run_tiles(x, weight, bias, labels, head, losses, gradients, token_weights)
        ctx.at_once = gradients
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, bias, labels, token_weights = ctx.saved_tensors
        gradients, ctx.at_once = ctx.at_once, None
        factor = None if gradients is None else _common_factor(grad, token_weights)
        if factor is None:
            gradients = None  # gone before the new ones come
            gradients = _new_gradients(x, weight, bias, ctx.needs_input_grad, ctx.head)
            _run_tiles(x, weight, bias, labels, ctx.head, None, gradients, grad)
        else:
            for tensor in (gradients.x, gradients.bias):
                if tensor is not None:
                    tensor.mul_(factor)
            if gradients.weight is not None:
                gradients.weight.scale(factor)
        grad_weight = None
        if gradients.weight is not None:
            grad_weight = ctx.head.take_weight_gradient(gradients.weight.take())
        grad_bias = None if gradients.bias is None else gradients.bias.to(bias.dtype)
        return gradients.x, grad_weight, grad_bias, None, None, None


def _run_tiles(x, weight, bias, labels, head, losses, gradients, token_weights) -> None:
    """Fill losses [b, s] if given, and gradients for losses weighted by token_weights if given."""
    p, scattering, written = head.group.size(), None, None
    if head.chosen is not None:  # of other rows nothing is written
        of_losses = (losses, head.predicted) if losses is not None else ()
        for tensor in (*of_losses, gradients and gradients.x):
            if tensor is not None:
                tensor.zero_()
    for rows, chosen, shape, x_tile in _gathered_tiles(x, head):
        logits = F.linear(x_tile, weight, bias)  # [p t, b, v/p]
        if head.logits_scale != 1.0:
            logits.mul_(head.logits_scale)
        of_rows = _select(of_tile(labels, rows, p), chosen)
        targets = _Targets.of(of_rows, weight.shape[0], head.group.rank())
        if losses is not None and head.predicted is not None:
            likeliest = _likeliest(logits, head.group)
            put_tile(head.predicted, rows, p, _spread(likeliest, chosen, shape))
        exponentials, factor, loss = _exponentials_(logits, targets, head.group)
        if losses is not None:
            put_tile(losses, rows, p, _spread(loss, chosen, shape))
        if gradients is not None:
            of_token = _select(of_tile(token_weights, rows, p), chosen).to(factor.dtype)
            of_token = of_token * head.logits_scale
            factor *= of_token
            grad = _logits_gradient_(exponentials, factor, of_token, targets, out=logits)
            del exponentials, logits
            if gradients.x is not None:
                if scattering is not None:
                    gradients.x[written] = scattering.wait()
                grad_x = _spread(grad @ weight, chosen, shape)
                scattering, written = reduce_scatter_async(grad_x, head.group), rows
                del grad_x
            if gradients.weight is not None:
                gradients.weight.add_product(grad.flatten(0, 1).t(), x_tile.flatten(0, 1))
            if gradients.bias is not None:
                gradients.bias += grad.sum((0, 1), dtype=gradients.bias.dtype)
            del grad
        else:
            del exponentials, logits
        del x_tile
    if scattering is not None:
        gradients.x[written] = scattering.wait()


def _gathered_tiles(
    x: Tensor, head: _Head
) -> Iterator[tuple[slice, Tensor | None, torch.Size, Tensor]]:
    """(rows, which count, [p t, b], x of those of every rank that count), while the next come."""
    remaining = head.tiles(x)
    following = next(remaining, None)
    pending: Pending | None = None
    while following is not None:
        rows, chosen = following
        pending = pending or all_gather_async(x[rows], head.group)
        gathered, pending = pending.wait(), None
        shape, x_tile = gathered.shape[:2], _select(gathered, chosen)
        del gathered  # before the next are as many
        following = next(remaining, None)
        if following is not None:
            pending = all_gather_async(x[following[0]], head.group)
        yield rows, chosen, shape, x_tile
        del x_tile


def _select(of_rows: Tensor, chosen: Tensor | None) -> Tensor:
    """[p t, b, ...] -> the n chosen rows [n, 1, ...], or all as they are."""
    return of_rows if chosen is None else of_rows.flatten(0, 1)[chosen][:, None]


def _spread(of_chosen: Tensor, chosen: Tensor | None, shape: torch.Size) -> Tensor:
    """[n, 1, ...] -> [p t, b, ...], shape being [p t, b], with zeros where none was chosen."""
    if chosen is None:
        return of_chosen
    rows = of_chosen.new_zeros(shape.numel(), *of_chosen.shape[2:])
    return rows.index_copy_(0, chosen, of_chosen[:, 0]).unflatten(0, shape)


@dataclass(frozen=True)
class _Targets:
    """Labels of a tile as the rank sees them: held, whether its shard has them, and where."""

    held: Tensor  # [p t, b]
    index: Tensor  # [p t, b, 1], 0 where not held

    @classmethod
    def of(cls, labels: Tensor, shard: int, rank: int) -> _Targets:
        local = labels - rank * shard
        held = (local >= 0) & (local < shard)
        return cls(held, torch.where(held, local, 0)[..., None])


def _exponentials_(logits, targets, group) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logits - their largest) of the rank's v/p in float32, their factor, and the loss.

    [p t, b, v/p] -> [p t, b, v/p] and twice [p t, b]. Exponentials times factor are the softmax
    over all of v. Float32 logits are overwritten.
    """
    wide = logits.to(accumulation_dtype(logits.dtype))
    top = wide.amax(-1)
    of_target = torch.where(targets.held, wide.gather(-1, targets.index).squeeze(-1), 0)
    exponentials = wide.sub_(top[..., None]).exp_()
    lse = top + exponentials.sum(-1).log()
    if group.size() == 1:
        return exponentials, torch.exp(top - lse), lse - of_target
    by_rank = all_gather(torch.stack((lse, of_target))[None], group)  # [p, 2, p t, b]
    lse = torch.logsumexp(by_rank[:, 0], 0)
    return exponentials, torch.exp(top - lse), lse - by_rank[:, 1].sum(0)


def _likeliest(logits: Tensor, group: ProcessGroup) -> Tensor:
    """[p t, b, v/p] -> the label of the largest logit of all of v [p t, b]."""
    top, place = logits.max(-1)
    if group.size() == 1:
        return place
    place = place + group.rank() * logits.shape[-1]
    tops, places = all_gather(top[None], group), all_gather(place[None], group)  # [p, p t, b]
    return places.gather(0, tops.argmax(0, keepdim=True)).squeeze(0)


def _logits_gradient_(exponentials, factor, of_token, targets, *, out) -> Tensor:
    """factor exponentials - of_token onehot, rounded once into out."""
    at_target = exponentials.gather(-1, targets.index) * factor[..., None]
    at_target -= torch.where(targets.held, of_token, 0)[..., None]
    grad = torch.mul(exponentials, factor[..., None], out=out)
    return grad.scatter_(-1, targets.index, at_target.to(grad.dtype))


def _new_gradients(x, weight, bias, needs_input_grad, head: _Head) -> _Gradients:
    """The weight's in float32 at least, unless there is one tile: its product is rounded anyway."""
    wide = accumulation_dtype(weight.dtype)
    of_weight = weight.dtype if head.chosen is not None and len(head.chosen) == 1 else wide
    return _Gradients(
        x=torch.empty_like(x) if needs_input_grad[0] else None,
        weight=WeightSum(weight, of_weight) if needs_input_grad[1] else None,
        bias=torch.zeros_like(bias, dtype=wide)
        if bias is not None and needs_input_grad[2]
        else None,
    )


def _common_factor(grad: Tensor, token_weights: Tensor) -> float | None:
    """c where grad = c token_weights up to rounding, or None where there is no such c.

    Waits for the device, once. grad and token_weights are the same numbers on every rank of the
    group, and so is the answer. It is a number and not a tensor: a GPU would round a tensor to the
    dtype of what it multiplies, and so scale all gradients alike.
    """
    weights = token_weights.to(grad.dtype)
    index = weights.abs().argmax()
    largest = weights.take(index)
    factor = torch.where(largest == 0, 0, grad.take(index) / largest)
    expected = factor * weights
    tolerance = ROUNDINGS * torch.finfo(grad.dtype).eps
    agrees = (grad - expected).abs() <= tolerance * expected.abs()
    all_agree, number = torch.stack((agrees.all().to(factor.dtype), factor)).tolist()
    return number if all_agree else None
