"""Bytes of tensors that an operation keeps, allocates at its peaks, and sends: measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.strategies.collectives import count_communication


@dataclass(frozen=True)
class Measured:
    """As sizes.Costs has them, of this rank."""

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    forward_sent_bytes: int
    backward_sent_bytes: int


def measure(
    run: Callable[[], Tensor],
    x: Tensor,
    parameters: Sequence[Tensor],
    grad: Tensor,
    *,
    others: Sequence[Tensor] = (),
) -> Measured:
    """run() computes something of x and the parameters; `grad` is the gradient of its result.

    `others` are tensors that run() reads and does not make (angles of RoPE). Only x counts as kept
    if it is.
    """
    elsewhere = {t.untyped_storage()._cdata for t in (*parameters, *others)}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in elsewhere:
            kept[storage._cdata] = storage.nbytes()
        return t

    tracker = LiveBytes([x, grad, *parameters, *others])
    with tracker, count_communication() as forward_sent, saved_tensors_hooks(pack, lambda t: t):
        output = run()
    forward_peak, live = tracker.peak_bytes, tracker.live_bytes  # live: kept, and the output
    tracker.reset_peak()
    with tracker, count_communication() as backward_sent:
        grads = torch.autograd.grad(output, [x, *parameters], grad)
    del grads
    return Measured(
        kept_bytes=sum(kept.values()),
        forward_bytes=forward_peak - (live - output.nbytes),
        backward_bytes=tracker.peak_bytes - live,
        forward_sent_bytes=forward_sent.total_bytes,
        backward_sent_bytes=backward_sent.total_bytes,
    )
