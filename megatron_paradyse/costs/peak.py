"""Seconds and peak bytes of a plan, walked over the costs of its operations.

Each operation's costs hold above what is alive before it, with its input among that, so that the
peak of a sequence of operations is a walk: forward with what is kept growing, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron_paradyse.costs.table import ATTENTION, EMBEDDING, HEAD, MLP, MODEL, OperationCosts
from megatron_paradyse.strategies import RECOMPUTE

CostsOf = Callable[[str, str], OperationCosts]  # (strategy, operation) -> costs at one (s, b)


def plan_operations(layers: Iterable[tuple[str, str]], costs_of: CostsOf) -> list[OperationCosts]:
    """A microbatch's operations in forward order; layers are (attention, mlp) strategies."""
    operations = [costs_of(MODEL, EMBEDDING)]
    for attention, mlp in layers:
        if attention.endswith(RECOMPUTE) and mlp.endswith(RECOMPUTE):
            operations.append(recomputed_layer(attention, mlp, costs_of))
        else:
            operations += [costs_of(attention, ATTENTION), costs_of(mlp, MLP)]
    return [*operations, costs_of(MODEL, HEAD)]


def recomputed_layer(attention: str, mlp: str, costs_of: CostsOf) -> OperationCosts:
    """Both halves under one checkpoint, which keeps the layer's input only.

    x: the bytes of an activation [s/p, b, h]; a, m: the halves; a', m': with +recompute.

        forward   max(a'.forward, x + m'.forward): attention's output waits for the MLP
        backward  runs both halves again, keeping a.kept + m.kept, then back through the MLP;
                  then, still holding the layer's output, through the attention
    """
    first, second = costs_of(attention, ATTENTION), costs_of(mlp, MLP)
    a = costs_of(attention.removesuffix(RECOMPUTE), ATTENTION)
    m = costs_of(mlp.removesuffix(RECOMPUTE), MLP)
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
            both + m.backward_bytes,
            x + a.kept_bytes + a.backward_bytes,
        ),
    )


def total_seconds(operations: Sequence[OperationCosts]) -> float:
    """Forward and backward of a microbatch."""
    return sum(operation.time_seconds for operation in operations)


def peak_bytes(operations: Sequence[OperationCosts]) -> float:
    """The peak of one microbatch above static bytes."""
    live = peak = 0.0
    for operation in operations:
        live += operation.kept_bytes
        peak = max(peak, live + operation.forward_bytes)
    for operation in reversed(operations):
        peak = max(peak, live + operation.backward_bytes)
        live -= operation.kept_bytes
    return peak
