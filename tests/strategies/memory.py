"""Bytes of tensors that one layer keeps, allocates at the peak, and sends: measured."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.strategies import get_strategy
from megatron_paradyse.strategies.collectives import count_communication
from megatron_paradyse.strategies.reference import map_tensors, shard_attention, shard_mlp
from tests.strategies.layers import AttentionCase, MlpCase, inputs_of, microbatch_of


@dataclass(frozen=True)
class Measured:
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    forward_sent_bytes: int
    backward_sent_bytes: int


def measure(group, case: AttentionCase | MlpCase) -> Measured:
    """One layer, forward and backward, on this rank."""
    p, rank = group.size(), group.rank()
    x, grad, weights = inputs_of(case)
    strategy = get_strategy(case.strategy)
    mlp = isinstance(case, MlpCase)
    shards = shard_mlp(weights, case.shape, p, rank) if mlp else shard_attention(weights, p, rank)
    shards = map_tensors(shards, lambda t: t.to(case.dtype, copy=True).requires_grad_())
    x = x.chunk(p)[rank].to(case.dtype, copy=True).requires_grad_()
    grad = grad.chunk(p)[rank].to(case.dtype, copy=True)
    microbatch = None if mlp else microbatch_of(case)
    held = [t for f in fields(shards) if (t := getattr(shards, f.name)) is not None]
    held += [] if mlp or microbatch.rope is None else [microbatch.rope]

    kept: dict[int, int] = {}
    parameters = {t.untyped_storage()._cdata for t in held}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes()
        return t

    tracker = LiveBytes([x, grad, *held])
    with tracker, count_communication() as forward_sent, saved_tensors_hooks(pack, lambda t: t):
        if mlp:
            output = strategy.mlp(x, shards, case.shape, group)
        else:
            output = strategy.attention(x, shards, case.shape, microbatch, group)
    forward_peak, live = tracker.peak_bytes, tracker.live_bytes  # live: kept, and the output
    inputs = [x, *(t for t in held if t.requires_grad)]
    tracker.reset_peak()
    with tracker, count_communication() as backward_sent:
        grads = torch.autograd.grad(output, inputs, grad)
    del grads
    return Measured(
        kept_bytes=sum(kept.values()),
        forward_bytes=forward_peak - (live - output.nbytes),
        backward_bytes=tracker.peak_bytes - live,
        forward_sent_bytes=forward_sent.total_bytes,
        backward_sent_bytes=backward_sent.total_bytes,
    )
