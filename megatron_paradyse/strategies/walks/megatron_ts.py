"""The walks of megatron_ts.py."""

from __future__ import annotations

from megatron_paradyse.strategies.sizes import LayerSizes, Ledger
from megatron_paradyse.strategies.walks.head_norms import norms_backward
from megatron_paradyse.strategies.walks.rows import index_bytes, whole_backward, whole_forward
from megatron_paradyse.strategies.walks.steps import (
    activate,
    activation_gradient_bytes,
    fc1_output,
    fc2_input,
    gate_backward,
    hold_gated,
    normalise_and_rotate,
    split_backward,
    turn_backward,
)


def mlp_forward(m: Ledger, z: LayerSizes) -> None:
    gathered = z.p * z.x
    m.hold(gathered=gathered, y=fc1_output(z))
    m.drop("gathered")
    activate(m, z, fc2_input(z))
    m.hold(partial=gathered, output=z.x)
    m.keep("y")


def mlp_backward(m: Ledger, z: LayerSizes) -> None:
    gathered, active, y = z.p * z.x, fc2_input(z), fc1_output(z)
    m.hold(gathered=gathered)
    activate(m, z, active)
    m.hold(grad_fc2=z.fc2_weight // z.p)
    m.drop("active")
    m.hold(grad_active=active)
    m.touch(activation_gradient_bytes(z, active))
    m.hold(grad_y=y)
    m.drop("grad_active", "gathered")
    m.release(y)
    m.hold(x=gathered, partial=gathered, grad_x=z.x)
    m.hold(grad_fc1=z.fc1_weight // z.p, grad_bias=z.fc1_bias // z.p)


def _kv(z: LayerSizes) -> int:
    """At least one head each."""
    return max(z.kv, 2 * z.s * z.b * z.d * z.element_bytes)


def attention_forward(m: Ledger, z: LayerSizes) -> None:
    gathered, mixed, kv = z.p * z.x, z.mixed, _kv(z)
    m.hold(indices=index_bytes(z), x=gathered, mixed=mixed)  # indices: of all layers
    m.drop("x")
    m.hold(unordered=0 if z.in_order else mixed)
    if z.g < z.p:
        m.hold(by_rank=z.p * mixed, all_heads=z.p * mixed)
        m.touch(z.q + kv + z.gates)
        m.drop("by_rank", "all_heads")
    m.hold(q=z.q, kv=kv, gate=z.gates)
    m.drop("mixed", "unordered")
    normalise_and_rotate(m, z, q=z.q, kv=kv, rows=z.s)
    whole_forward(m, z)
    m.keep("q", "kv", "lse", "indices")
    hold_gated(m, z, z.gates, positions=z.s)
    into_proj = "gated" if z.gate else "out"
    if not z.in_order:
        m.keep("out")
        m.hold(in_rows=z.q)
        m.drop("gated")
        into_proj = "in_rows"
    elif z.gate:
        m.keep("out")
    m.hold(partial=gathered, output=z.x)
    m.keep("gate", into_proj)


def attention_backward(m: Ledger, z: LayerSizes) -> None:
    gathered, mixed, kv = z.p * z.x, z.mixed, _kv(z)
    m.hold(grad=gathered, grad_proj=z.proj_weight // z.p, grad_out=z.q)
    m.drop("grad")
    m.release(z.gates if z.in_order else z.q)
    m.touch(0 if z.in_order else z.q)
    gate_backward(m, z, z.gates, positions=z.s)
    m.release(z.gates)
    whole_backward(m, z, kv=kv)
    m.drop("grad_out")
    m.release(2 * z.q + kv + z.lse)
    if z.g < z.p:
        turn_backward(m, z, q=z.q, kv=kv, rows=z.s)
        norms_backward(m, z, q=z.q, kv=kv)
        # Those of q and of the gate, zero-padded to the query heads of a key head; all together.
        padded = z.p * (z.q + z.gates) // z.g
        m.touch(padded - z.q)
        m.hold(slot=z.p * mixed // z.g)
        m.touch(padded - z.q)
        m.drop("grad_qkv", "grad_gate", "slot")
        # The sum, zero-padded to the heads of all ranks, and a copy to be scattered.
        m.hold(grad_mixed=mixed)
        m.touch(2 * z.p * mixed)
    else:
        split_backward(m, z, q=z.q, kv=kv, rows=z.s)
    m.touch(0 if z.in_order else mixed)
    m.hold(x=gathered, partial=gathered)
    m.hold(grad_x=z.x, grad_weight=z.qkv_weight // z.p)
    if z.bias:
        m.hold(grad_bias=z.qkv_weight // z.h // z.p)
