"""What each strategy costs, by formula: FLOPs, bytes sent, bytes kept, workspace.

Per rank and per operation (attention, mlp) of one layer, for documents=None. The workspace comes
from walking the same allocations and releases as the code, in a Ledger that holds numbers instead
of tensors. docs/strategies.md derives the closed forms. Buffers inside kernels are not counted.
"""

from __future__ import annotations

from math import lcm

from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies import parse_strategy_name
from megatron_paradyse.strategies.sizes import Costs, LayerSizes
from megatron_paradyse.strategies.walks import WALKS


def operation_costs(strategy: str, operation: str, sizes: LayerSizes) -> Costs:
    """Costs of "attention" or "mlp" under a strategy, +recompute included, for p > 1."""
    base, recompute = parse_strategy_name(strategy)
    if (base, operation) not in WALKS:
        raise UserError(f"no cost formulas for the {operation} of {base}: profile it instead")
    kept, forward_bytes, backward_bytes = WALKS[base, operation](sizes)
    forward_flops, backward_flops = _flops(base, operation, sizes)
    forward_sent, backward_sent = _sent_bytes(base, operation, sizes)
    costs = Costs(
        forward_flops=forward_flops,
        backward_flops=backward_flops,
        forward_sent_bytes=forward_sent,
        backward_sent_bytes=backward_sent,
        kept_bytes=kept + (0 if _replaces_x(base, operation, sizes) else sizes.x),
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
    )
    return _recomputed(costs, sizes, kept) if recompute else costs


def _replaces_x(base: str, operation: str, z: LayerSizes) -> bool:
    """Whether the operation keeps its own rearranged copy of x instead of x."""
    return base == "megatron_cz" and operation == "attention" and z.causal


def _recomputed(costs: Costs, z: LayerSizes, made_anew: int) -> Costs:
    """Keeps x; the backward first makes anew what the forward would have kept, and an output."""
    return Costs(
        forward_flops=costs.forward_flops,
        backward_flops=costs.forward_flops + costs.backward_flops,
        forward_sent_bytes=costs.forward_sent_bytes,
        backward_sent_bytes=costs.forward_sent_bytes + costs.backward_sent_bytes,
        kept_bytes=z.x,
        forward_bytes=made_anew + costs.forward_bytes,
        backward_bytes=made_anew + max(costs.forward_bytes, costs.backward_bytes + z.x),
    )


def _flops(base: str, operation: str, z: LayerSizes) -> tuple[int, int]:
    """Matrix products only: 2 per multiply-add; the gradient of a linear costs two linears."""
    if operation == "mlp":
        linear = 2 * z.rows * z.h * (z.fc1_rows + z.f)
        return linear, 2 * linear
    linear = 2 * z.rows * z.h * (2 * z.n + 2 * z.g) * z.d
    scores = z.b * z.n * z.s * (z.s + 1) // (2 * z.p) if z.causal else z.rows * z.n * z.s
    product = 2 * z.d * scores
    if base == "colossal_z":  # its products with the probabilities skip no masked ones
        dense = 2 * z.d * z.rows * z.n * z.s
        return linear + product + dense, 2 * linear + 4 * dense
    # Fused kernels compute the scores again in the backward: five products instead of four.
    return linear + 2 * product, 2 * linear + 5 * product


def _sent_bytes(base: str, operation: str, z: LayerSizes) -> tuple[int, int]:
    others = z.p - 1
    if base == "megatron_ts":
        heads = others * z.qkv if operation == "attention" and z.g < z.p else 0
        return 2 * others * z.x + heads, 3 * others * z.x + heads
    if operation == "mlp":
        return _zero_sent(z, z.fc1_weight + z.fc2_weight, z.fc1_rows)
    forward, backward = _zero_sent(z, z.qkv_weight + z.proj_weight, (z.n + 2 * z.g) * z.d)
    if base == "ulysses_z":
        packed = z.q + z.kv // z.g * lcm(z.g, z.p)
        inner = others * (packed + z.q) // z.p
        return forward + inner, backward + inner
    swaps = 0
    if base == "megatron_cz" and z.causal:
        swaps = 2 * (z.s // z.p // 2) * z.b * z.h * z.element_bytes
    inner = others * z.kv
    return forward + swaps + inner, backward + swaps + inner + z.p * z.wide(z.kv)


def _zero_sent(z: LayerSizes, weights: int, bias_rows: int) -> tuple[int, int]:
    """Shards of weights and bias gathered; gathered again and their wide gradients scattered."""
    others = z.p - 1
    bias = bias_rows * z.element_bytes if z.bias else 0
    forward = others * (weights + bias) // z.p
    backward = others * (weights + z.wide(weights + bias)) // z.p
    return forward, backward
