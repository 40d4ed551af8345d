"""Costs of a layer whose halves both recompute: they are not the sum of the two halves'."""

from __future__ import annotations

from collections.abc import Callable

from megatron_paradyse.costs.table import ATTENTION, MLP, OperationCosts
from megatron_paradyse.strategies import RECOMPUTE, base_name

CostsOf = Callable[[str, str], OperationCosts]  # (strategy, operation) -> costs at one (s, b)


def recomputed_layer(attention: str, mlp: str, costs_of: CostsOf) -> OperationCosts:
    """Both halves under one checkpoint, which keeps the layer's input only.

    x: the bytes of an activation [s/p, b, h]; a, m: the halves; a', m': with +recompute. A name
    with +offload counts as one with +recompute: where the input waits is not told here.

        forward   max(a'.forward, x + m'.forward): attention's output waits for the MLP
        backward  runs both halves again, keeping a.kept + m.kept, the layer's output until it is
                  there; then back through the MLP, and through the attention while the gradient
                  of the output is held
    """
    a, m = costs_of(base_name(attention), ATTENTION), costs_of(base_name(mlp), MLP)
    first = costs_of(base_name(attention) + RECOMPUTE, ATTENTION)
    second = costs_of(base_name(mlp) + RECOMPUTE, MLP)
    x = second.kept_bytes
    both = a.kept_bytes + m.kept_bytes
    return OperationCosts(
        forward_seconds=first.forward_seconds + second.forward_seconds,
        backward_seconds=first.backward_seconds + second.backward_seconds,
        kept_bytes=x,
        forward_bytes=max(first.forward_bytes, x + second.forward_bytes),
        backward_bytes=max(
            a.kept_bytes + a.forward_bytes,
            both + m.forward_bytes,
            both - x + m.backward_bytes,
            a.kept_bytes + a.backward_bytes,
        ),
    )
