"""A case on one process, as the float64 oracle, and by a strategy on shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_paradyse.strategies import get_strategy, sizes
from megatron_paradyse.strategies.contract import (
    AttentionWeights,
    Microbatch,
    MlpWeights,
    Wide,
)
from megatron_paradyse.strategies.reference import (
    reference_attention,
    reference_mlp,
    shard_attention,
    shard_mlp,
)
from megatron_paradyse.strategies.sizes import TILE_ROWS
from tests.strategies.cases import (
    AttentionCase,
    MlpCase,
    inputs_of,
    microbatch_of,
    positions_of,
)
from tests.strategies.deviations import Deviation, deviation


def map_tensors(weights, function):
    """The same weights with function applied to each tensor that is there."""
    tensors = {f.name: getattr(weights, f.name) for f in fields(weights)}
    return replace(weights, **{k: function(t) for k, t in tensors.items() if t is not None})


def run_and_differentiate(function, x: Tensor, weights, grad: Tensor):
    """Output, gradient of x and gradients of the weights by name."""
    x = x.detach().clone().requires_grad_()
    weights = map_tensors(weights, lambda t: t.detach().clone().requires_grad_())
    names = [f.name for f in fields(weights) if getattr(weights, f.name) is not None]
    output = function(x, weights)
    output.backward(grad)
    return output.detach(), x.grad, {name: getattr(weights, name).grad for name in names}


def run_reference(
    case: AttentionCase | MlpCase,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    from_output: bool = False,
):
    """The single-process layer in `dtype`: output, input gradient, weights of gradients."""
    x, grad, weights = inputs_of(case)
    x, grad = x.to(device), grad.to(device)

    def function(x, weights):
        if isinstance(case, MlpCase):
            return reference_mlp(x, weights, case.shape)
        microbatch = microbatch_of(case, device)
        return reference_attention(x, weights, case.shape, microbatch, from_output=from_output)

    weights = map_tensors(weights, lambda t: t.to(device, dtype))
    output, grad_x, grads = run_and_differentiate(function, x.to(dtype), weights, grad.to(dtype))
    return output, grad_x, replace(weights, **grads)


def run_documents_one_by_one(case: AttentionCase):
    """As run_reference, in float64, each document of the row alone in a microbatch of its own."""
    assert case.row is not None
    x, grad, weights = inputs_of(case)
    rope = microbatch_of(case).rope
    output, grad_x = torch.zeros_like(x), torch.zeros_like(x)
    totals = map_tensors(weights, torch.zeros_like)
    for start, stop in case.row.documents:
        alone = Microbatch(stop - start, 1, rope=None if rope is None else rope[start:stop])

        def function(x, weights, alone=alone):
            return reference_attention(x, weights, case.shape, alone)

        held = slice(start, stop)
        output[held], grad_x[held], grads = run_and_differentiate(
            function, x[held], weights, grad[held]
        )
        for name, part in grads.items():
            getattr(totals, name).add_(part)
    return output, grad_x, totals


@dataclass
class RankLayer:
    """A case as one rank sees it: its shards, in the case's dtype, and the layer of them."""

    x: Tensor
    weights: AttentionWeights | MlpWeights
    grad: Tensor
    microbatch: Microbatch | None
    run: Callable[[Tensor, AttentionWeights | MlpWeights], Tensor]


def shard_of(case: AttentionCase | MlpCase, weights, p: int, rank: int):
    if isinstance(case, MlpCase):
        return shard_mlp(weights, case.shape, p, rank)
    return shard_attention(weights, p, rank)


def rank_layer(
    group, case: AttentionCase | MlpCase, device: str = "cpu", *, wide: Wide | None = None
) -> RankLayer:
    """Raises if the strategy refuses the case. Tensors are leaves that require gradients.

    wide: of a row over several groups, of which this is one.
    """
    p, rank = group.size(), group.rank()
    strategy = get_strategy(case.strategy)
    x, grad, weights = inputs_of(case)
    shards = shard_of(case, weights, p, rank)
    microbatch = None if isinstance(case, MlpCase) else microbatch_of(case, device)
    holders = group
    if microbatch is not None:
        microbatch = replace(microbatch, wide=wide)
        holders = microbatch.sequence_group(group)

    def run(x, weights):
        sizes.TILE_ROWS = case.tile_rows or TILE_ROWS  # also for the backward
        if isinstance(case, MlpCase):
            return strategy.mlp(x, weights, case.shape, group)
        strategy.check(case.shape, p)
        return strategy.attention(x, weights, case.shape, microbatch, group)

    def local(t: Tensor) -> Tensor:
        return t.to(device, case.dtype, copy=True)

    mine = positions_of(case, holders.size(), holders.rank())
    return RankLayer(
        local(x[mine]).requires_grad_(),
        map_tensors(shards, lambda t: local(t).requires_grad_()),
        local(grad[mine]),
        microbatch,
        run,
    )


def run_case(
    group, case: AttentionCase | MlpCase, device: str = "cpu", *, layer: RankLayer | None = None
) -> dict[str, Deviation]:
    """Deviations of this rank's part on `device` from the float64 oracle on the CPU, by tensor."""
    p, rank = group.size(), group.rank()
    layer = layer or rank_layer(group, case, device)
    output, grad_x, grads = run_and_differentiate(layer.run, layer.x, layer.weights, layer.grad)
    for name in grads:
        if "norm" in name:  # partial sums, which Megatron adds up over the group
            grads[name] = grads[name].double().cpu()
            dist.all_reduce(grads[name], group=group)
    if isinstance(case, AttentionCase) and case.row is not None and not case.dropout:
        true_output, true_grad_x, true_grads = run_documents_one_by_one(case)
    else:
        true_output, true_grad_x, true_grads = run_reference(case, torch.float64)
    truth, mine = shard_of(case, true_grads, p, rank), positions_of(case, p, rank)
    return {
        "output": deviation(output, true_output[mine]),
        "x": deviation(grad_x, true_grad_x[mine]),
    } | {name: deviation(grads[name], getattr(truth, name)) for name in grads}


def errors_of_one_process(
    case, device: str = "cpu", *, from_output: bool = False
) -> dict[str, float]:
    """Errors by norm of the single-process layer in the case's dtype against float64."""
    output, grad_x, grads = run_reference(case, case.dtype, device, from_output=from_output)
    true_output, true_grad_x, true_grads = run_reference(case, torch.float64)
    pairs = {"output": (output, true_output), "x": (grad_x, true_grad_x)} | {
        name: (getattr(grads, name), truth)
        for name, truth in vars(true_grads).items()
        if truth is not None
    }
    return {name: deviation(*pair).by_norm for name, pair in pairs.items()}
