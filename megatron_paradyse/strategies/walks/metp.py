"""The walks of metp_attention.py and metp_mlp.py.

In the attention an owner holds its own gradients from its turn on.
"""

from __future__ import annotations

from megatron_paradyse.strategies.sizes import LayerSizes, Ledger
from megatron_paradyse.strategies.walks import latents
from megatron_paradyse.strategies.walks.aligned import (
    block_rows,
    hold_aligned,
    hold_shard_gradient,
)
from megatron_paradyse.strategies.walks.rings import (
    in_two_spans,
    ring_backward,
    ring_forward,
    second_half,
    swaps,
)
from megatron_paradyse.strategies.walks.steps import (
    activate,
    activation_gradient_bytes,
    fc1_output,
    fc2_input,
    gate_backward,
    hold_gated,
    product_piece,
    split_and_rotate,
    split_backward,
)


def mlp_forward(m: Ledger, z: LayerSizes) -> None:
    """All blocks are alike: the one in use, or sent, and the next; x W in a half type."""
    m.hold(total=z.wide(z.x), blocks=2 * _mlp_block(z), y=fc1_output(z) // z.p)
    activate(m, z, fc2_input(z) // z.p)
    m.drop("y")
    m.touch(product_piece(z, z.rows, z.h))
    m.drop("active", "blocks")
    if z.half_type:
        m.hold(output=z.x)


def mlp_backward(m: Ledger, z: LayerSizes) -> None:
    """From the second block on, its gradients are computed, arriving and being sent."""
    block, y, active = _mlp_block(z), fc1_output(z) // z.p, fc2_input(z) // z.p
    m.hold(grad_x=z.wide(z.x))
    m.touch(2 * block)
    for step in sorted({0, 1, z.p - 1}):
        m.hold(blocks=min(2, z.p - 1 - step) * block, grad_block=z.wide(block))
        m.hold(hops=2 * z.wide(block) if step > 0 else 0, y=y)
        if z.gated:
            m.hold(gate=active)
        m.hold(active=active)
        m.touch(z.fc2_weight // z.p if z.half_type else 0)
        m.hold(grad_active=active)
        m.touch(activation_gradient_bytes(z, active) - (2 if z.gated else 1) * active)
        m.hold(grad_y=y)
        m.drop("y", "active", "grad_active", *(["gate"] if z.gated else []))
        m.touch(max(z.fc1_weight // z.p if z.half_type else 0, product_piece(z, z.rows, z.h)))
        m.drop("blocks", "grad_block", "hops", "grad_y")
    m.hold(own_gradient=z.wide(block))
    if z.half_type:
        m.hold(output=z.x, narrow_gradient=block)


def _mlp_block(z: LayerSizes) -> int:
    return (z.fc1_weight + z.fc2_weight + z.fc1_bias) // z.p


def attention_forward(m: Ledger, z: LayerSizes) -> None:
    q, kv, lse, gates = z.q // z.p, z.kv_sent // z.p, z.lse // z.p, z.gates // z.p
    block = _attention_block(z)
    hold_aligned(m, z)
    if swaps(m.rank, z):
        m.hold(swapped=z.input)
        m.touch(block + second_half(z, z.input))
    first = _first_owner(z)
    m.hold(total=z.wide(z.x), of_earlier=first * (q + lse))
    for owner in range(first, z.p):
        m.hold(blocks=min(2, z.p - owner) * block)
        _hold_mixed(m, z)
        split_and_rotate(
            m,
            z,
            q=q,
            kv=kv,
            rows=z.positions,
            in_two_spans=in_two_spans(m.rank, z),
            has_graph=False,
        )
        m.hold(packed=kv)
        m.drop("kv")
        ring_forward(m, z, q=q, kv=kv, lse=lse)
        m.drop("q", "packed")
        hold_gated(m, z, gates, positions=z.positions, values=_narrow_values(z))
        m.touch(product_piece(z, z.rows, z.h))
        m.drop("blocks", "out", "lse", "gate", "gated")
        m.hold(**{f"of_{owner}": q + lse})
    m.drop("aligned", "aligned_bias")
    if z.half_type:
        m.hold(output=z.x)
        m.drop("total")
    if swaps(m.rank, z):
        m.touch(z.x + second_half(z, z.x))
        m.keep("swapped")
    m.keep("of_earlier", *(f"of_{owner}" for owner in range(first, z.p)))


def attention_backward(m: Ledger, z: LayerSizes) -> None:
    _attention_backward(m, z, parts=1)


def attention_second_backward(m: Ledger, z: LayerSizes) -> None:
    _attention_backward(m, z, parts=z.kv_heads_sent // z.p if z.is_tiled else 1)


def _attention_backward(m: Ledger, z: LayerSizes, *, parts: int) -> None:
    """parts: of a block's heads, of which the ring takes one at a time, in place if many."""
    q, kv, lse, gates = z.q // z.p, z.kv_sent // z.p, z.lse // z.p, z.gates // z.p
    block, heads = _attention_block(z), z.n // z.p
    hold_aligned(m, z)
    if swaps(m.rank, z):
        m.hold(grad=z.x)
        m.touch(block + second_half(z, z.x))
    m.hold(grad_x=z.wide(z.input))
    for owner in range(_first_owner(z), z.p):
        m.hold(blocks=min(2, z.p - owner) * block)
        summed = min(1, owner) + (m.rank <= owner - 2)  # those on their way, and the own gradients
        m.hold(summed=summed * z.wide(block))
        _hold_mixed(m, z)
        split_and_rotate(
            m,
            z,
            q=q,
            kv=kv,
            rows=z.positions,
            in_two_spans=in_two_spans(m.rank, z),
            mixed_stays=True,
        )
        m.hold(packed=kv)
        m.drop("mixed", "kv")
        m.hold(narrow=_narrow_values(z), grad_out=q)
        m.drop("narrow")
        gate_backward(m, z, gates, positions=z.positions)
        if parts == 1:
            ring_backward(m, z, q=q, kv=kv, lse=lse, heads=heads)
        else:
            m.hold(own_chunk=kv // parts)
            part = {"q": q // parts, "kv": kv // parts, "lse": lse // parts}
            ring_backward(m, z, **part, heads=heads)
            m.drop("grad_qkv", "own_chunk", "q", "packed")
            m.hold(q=0, packed=0, grad_qkv=q + kv)
        m.drop("q", "packed", "grad_out")
        if z.latent is None:
            split_backward(m, z, q=q, kv=kv, rows=z.positions, q_stays=True, k_stays=True)
        else:
            latents.block_backward(m, z, parts=z.p)
        m.hold(grad_block=z.wide(block))
        m.touch(product_piece(z, z.rows, _columns(z)))
        if z.half_type:
            m.touch(max(_ups(z)))
        hold_gated(m, z, gates, positions=z.positions, values=_narrow_values(z))
        if z.half_type and z.latent is not None:
            m.touch(z.proj_weight // z.p)
        m.drop("blocks", "summed", "grad_mixed", "grad_block", "gate", "gated")
    m.hold(own_gradient=z.wide(block))
    hold_shard_gradient(m, z)
    if swaps(m.rank, z):
        m.drop("grad")
    if z.half_type:
        m.hold(output=z.input)
        m.drop("grad_x")
    if swaps(m.rank, z):
        m.touch(second_half(z, z.input))
        m.hold(swapped=z.input)
    if z.half_type:
        m.hold(narrow_gradient=_shard(z))


def _first_owner(z: LayerSizes) -> int:
    """From whose turn on a walk goes: before that no more is held than then."""
    return max(z.p - 2, 0)


def _shard(z: LayerSizes) -> int:
    """Of the weights and the bias, as the gradients are returned."""
    bias = z.qkv_weight // z.h if z.bias else 0
    ups = z.qkv_weight if z.latent is None else sum(z.up_weights)
    return (ups + z.proj_weight + bias) // z.p


def _attention_block(z: LayerSizes) -> int:
    bias = block_rows(z) * z.element_bytes if z.bias else 0
    return sum(_ups(z)) + bias + z.proj_weight // z.p


def _ups(z: LayerSizes) -> tuple[int, ...]:
    """Bytes of a block's weights besides proj."""
    if z.latent is not None:
        return tuple(weight // z.p for weight in z.up_weights)
    return (block_rows(z) * z.h * z.element_bytes,)


def _columns(z: LayerSizes) -> int:
    """Of these weights, at most."""
    return z.h if z.latent is None else max(z.latent_channels[:2])


def _hold_mixed(m: Ledger, z: LayerSizes) -> None:
    if z.latent is not None:
        latents.hold_block(m, z, parts=z.p)
    else:
        m.hold(mixed=(z.q + z.kv_sent + z.gates) // z.p)


def _narrow_values(z: LayerSizes) -> int:
    """Of a block; 0 where its output has no channels that proj does not take."""
    return z.values // z.p if z.narrow_values else 0
