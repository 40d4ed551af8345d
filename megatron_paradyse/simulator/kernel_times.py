"""Seconds of one kernel on a device: the longer of its arithmetic and of its memory traffic.

A matrix product works in tiles of 128 x 128 of its result, as many at a time as there are
multiprocessors, so that the last round may be half idle (tile and wave quantisation, as NVIDIA's
guide to matrix multiplication performance describes them). A fused attention kernel computes two
products per score in the forward and five in the backward; causal ones skip the masked half. All
else reads its inputs and writes its results once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_paradyse.simulator.hardware import Device

aten = torch.ops.aten
TILE = 128
# Allocate, or change what a tensor is seen as: no kernel runs.
NO_KERNEL = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided),
    *(aten.detach, aten.detach_, aten.alias, aten.set_, aten.resize_, aten.lift_fresh),
    *(aten._unsafe_view, aten._reshape_alias, aten.view, aten.t, aten._local_scalar_dense),
    *(aten.is_pinned, aten.record_stream),
}
# Overwrite their first argument without reading it.
OVERWRITES = {aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_}
LOOKS_UP = {aten.embedding, aten.index, aten.index_select, aten.gather}  # reads what it returns


class KernelTimes:
    """Seconds of the operations that PyTorch dispatches, on one device."""

    def __init__(self, device: Device):
        self._device = device
        self.num_scores: int | None = None  # per head that attention computes, where it is not all
        self._bytes_per_second = device.bandwidth_bytes_per_second * device.bandwidth_efficiency
        self._special: dict[object, Callable[[Sequence, object], float]] = {
            aten.mm: lambda args, _: self._product(args[0], args[1]),
            aten.bmm: lambda args, _: self._product(args[0], args[1]),
            aten.addmm: lambda args, _: self._product(args[1], args[2]),
            aten.addmm_: lambda args, _: self._product(args[1], args[2]),
            aten.baddbmm: lambda args, _: self._product(args[1], args[2]),
            aten._scaled_dot_product_flash_attention_for_cpu: lambda args, _: self._attention(
                args[0], args[1], causal=len(args) > 4 and args[4], forward=True
            ),
            aten._scaled_dot_product_flash_attention_for_cpu_backward: (
                lambda args, _: self._attention(args[1], args[2], causal=args[7], forward=False)
            ),
        }

    def seconds(self, func, args: Sequence, kwargs: dict, result: object) -> float | None:
        """Of one call of an operator; None where no kernel runs."""
        packet = func.overloadpacket
        if packet in NO_KERNEL or func.is_view or func.namespace == "prim":
            return None
        special = self._special.get(packet)
        if special is not None:
            return special(args, result)
        return self.traffic_seconds(moved_bytes(packet, args, result))

    def traffic_seconds(self, num_bytes: float) -> float:
        return num_bytes / self._bytes_per_second

    def _rate(self, x: Tensor) -> float:
        half = x.dtype in (torch.bfloat16, torch.float16)
        return self._device.half_flops if half else self._device.float32_flops

    def _product(self, a: Tensor, b: Tensor) -> float:
        """[..., m, k] x [..., k, n]."""
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        count = a.shape[0] if a.dim() == 3 else 1
        at_once = self._device.num_multiprocessors
        tiles = count * ceil(m / TILE) * ceil(n / TILE)
        flops = 2 * TILE * TILE * k * ceil(tiles / at_once) * at_once
        arithmetic = flops / (self._rate(a) * self._device.matmul_efficiency)
        moved = count * (m * k + k * n + m * n) * a.itemsize
        return max(arithmetic, self.traffic_seconds(moved))

    def _attention(self, q: Tensor, k: Tensor, *, causal: bool, forward: bool) -> float:
        """q [b, n, sq, d], k [b, g, sk, d]."""
        b, n, rows, d = q.shape
        device = self._device
        scores = self.num_scores
        if scores is None:
            scores = rows * (rows + 1) // 2 if causal else rows * k.shape[2]
        efficiency = (
            device.attention_forward_efficiency if forward else device.attention_backward_efficiency
        )
        if d <= 64:
            efficiency *= device.narrow_head_factor
        flops = (2 if forward else 5) * 2 * b * n * d * scores
        arithmetic = flops / (self._rate(q) * efficiency)
        tensors = (2 if forward else 4) * (_bytes(q) + _bytes(k))
        return max(arithmetic, self.traffic_seconds(tensors))


def moved_bytes(packet, args: Sequence, result: object) -> int:
    """Bytes that an elementwise or reducing operator reads and writes."""
    written = sum(_bytes(t) for t in tree_leaves(result) if isinstance(t, Tensor))
    if packet in LOOKS_UP:
        return 2 * written
    inputs = args[1:] if packet in OVERWRITES else args
    return written + sum(_bytes(t) for t in tree_leaves(inputs) if isinstance(t, Tensor))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.itemsize
