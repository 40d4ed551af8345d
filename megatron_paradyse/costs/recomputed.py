"""Costs of a layer whose halves both recompute: they are not the sum of the two halves'."""

from __future__ import annotations

from collections.abc import Callable

from megatron_paradyse.costs.layers import ALIKE, Operations
from megatron_paradyse.costs.table import OperationCosts
from megatron_paradyse.strategies import RECOMPUTE, base_name

CostsOf = Callable[[str, str], OperationCosts]  # (strategy, operation) -> costs at one (s, b)


def recomputed_layer(
    attention: str, mlp: str, costs_of: CostsOf, operations: Operations = ALIKE
) -> OperationCosts:
    """Both halves under one checkpoint, which keeps the layer's input only.

    x: the bytes of an activation [s/p, b, h]; a: attention; a', m': the halves with +recompute. A
    name with +offload counts as one with +recompute: where the input waits is not told here.
    operations: of the layer.

        forward   max(a'.forward, x + m'.forward): attention's output waits for the MLP
        backward  runs the attention again, and with what that keeps the MLP again and back
                  through it, as m' does alone; then back through the attention, as a' does. All
                  that time the gradient of the output is held
    """
    of_attention, of_mlp = operations
    a = costs_of(base_name(attention), of_attention)
    first = costs_of(base_name(attention) + RECOMPUTE, of_attention)
    second = costs_of(base_name(mlp) + RECOMPUTE, of_mlp)
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
