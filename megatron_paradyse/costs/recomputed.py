"""Costs of a layer whose halves both recompute: they are not the sum of the two halves'."""

from __future__ import annotations

from collections.abc import Callable

from megatron_paradyse.costs.table import ATTENTION, MLP, OperationCosts
from megatron_paradyse.strategies import RECOMPUTE, base_name

CostsOf = Callable[[str, str], OperationCosts]  # (strategy, operation) -> costs at one (s, b)


def recomputed_layer(attention: str, mlp: str, costs_of: CostsOf) -> OperationCosts:
    """Both halves under one checkpoint, which keeps the layer's input only.

    x: the bytes of an activation [s/p, b, h]; a: attention; a', m': the halves with +recompute. A
    name with +offload counts as one with +recompute: where the input waits is not told here.

        forward   max(a'.forward, x + m'.forward): attention's output waits for the MLP
        backward  runs the attention again, and with what that keeps the MLP again and back
                  through it, as m' does alone; then back through the attention, as a' does. All
                  that time the gradient of the output is held
    """
    a = costs_of(base_name(attention), ATTENTION)
    first = costs_of(base_name(attention) + RECOMPUTE, ATTENTION)
    second = costs_of(base_name(mlp) + RECOMPUTE, MLP)
    x = second.kept_bytes
    return OperationCosts(
        forward_seconds=first.forward_seconds + second.forward_seconds,
        backward_seconds=first.backward_seconds + second.backward_seconds,
        kept_bytes=x,
        forward_bytes=max(first.forward_bytes, x + second.forward_bytes),
        backward_bytes=max(
            a.kept_bytes + a.forward_bytes,
            a.kept_bytes + second.backward_bytes,
            x + first.backward_bytes,
        ),
    )
