"""The walks of zero.py and of the attentions between its two linears."""

from __future__ import annotations

from dataclasses import replace

from megatron_paradyse.strategies.sizes import LayerSizes, Ledger, of_tile
from megatron_paradyse.strategies.walks import latents
from megatron_paradyse.strategies.walks.rings import (
    in_two_spans,
    ring_backward,
    ring_forward,
    second_half,
    swaps,
)
from megatron_paradyse.strategies.walks.rows import (
    index_bytes,
    local_backward,
    local_forward,
    whole_backward,
    whole_forward,
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
    m.hold(fc1=z.fc1_weight, shard=z.fc2_weight // z.p, fc2=z.fc2_weight, y=fc1_output(z))
    m.touch(z.fc1_bias)
    m.drop("fc1")
    activate(m, z, fc2_input(z))
    m.drop("shard")
    m.hold(output=z.x)
    m.keep("y")


def mlp_backward(m: Ledger, z: LayerSizes) -> None:
    active, y = fc2_input(z), fc1_output(z)
    _linear_backward(
        m, z, z.fc2_weight, name="fc2", grad_input=active, transposed=True, active=active
    )
    m.touch(activation_gradient_bytes(z, active))
    m.hold(grad_y=y)
    m.drop("grad_input_fc2")
    _linear_backward_end(m, z, z.fc2_weight, name="fc2")
    m.release(y)
    _linear_backward(
        m, z, z.fc1_weight, name="fc1", grad_input=z.x, transposed=False, bias_rows=z.fc1_rows
    )
    _linear_backward_end(m, z, z.fc1_weight, name="fc1")


def mlp_tiles_forward(m: Ledger, z: LayerSizes) -> None:
    """Of zero_tiles.py; keeps nothing."""
    _gathered(m, z, output=z.x)
    tile = of_tile(z)
    m.hold(y=fc1_output(tile))
    activate(m, tile, fc2_input(tile))
    m.drop("y", "shard")
    m.touch(tile.x)
    m.drop("active", "fc1", "fc2", "bias")


def mlp_tiles_backward(m: Ledger, z: LayerSizes) -> None:
    """The gradients of weights are reduced while the last tile is computed."""
    _gathered(m, z, output=z.x)
    m.drop("shard")
    m.hold(sums=z.wide(z.fc1_weight + z.fc2_weight + z.fc1_bias))
    tile = of_tile(z)
    _tile_backward(m, z, tile)
    m.hold(reduced_fc2=z.wide(z.fc2_weight) // z.p)
    rest = z.s % tile.s
    last = replace(z, s=rest) if rest else tile
    _tile_backward(m, z, last, reduced_fc1=z.wide(z.fc1_weight) // z.p)
    m.drop("fc1", "fc2", "bias")
    m.hold(reduced_bias=z.wide(z.fc1_bias) // z.p, grad_fc2=z.fc2_weight // z.p)


def _tile_backward(m: Ledger, z: LayerSizes, tile: LayerSizes, **reduced: int) -> None:
    """reduced: held from the end of the tile's products on."""
    active, y = fc2_input(tile), fc1_output(tile)
    m.hold(y=y)
    activate(m, tile, active)
    m.touch(product_piece(z, z.f, z.h))
    m.drop("active")
    m.hold(grad_active=active)
    m.touch(activation_gradient_bytes(z, active))
    m.hold(grad_y=y)
    m.drop("grad_active", "y")
    m.touch(product_piece(z, z.fc1_rows, z.h))
    m.hold(**reduced)
    m.touch(tile.x)
    m.drop("grad_y")


def _gathered(m: Ledger, z: LayerSizes, *, output: int) -> None:
    """Holds fc1, fc2 and its shard, the bias and an output, or the gradient of x."""
    m.hold(bias=z.fc1_bias, fc1=z.fc1_weight, shard=z.fc2_weight // z.p, fc2=z.fc2_weight)
    m.hold(output=output)


def _linear_backward(
    m: Ledger,
    z: LayerSizes,
    weight: int,
    *,
    name: str,
    grad_input: int,
    transposed: bool,
    active: int = 0,
    bias_rows: int = 0,
) -> None:
    """Holds grad_input, and until _linear_backward_end the gradient of the full weight.

    active: bytes of the activation that is run again for the weight's gradient. bias_rows: of the
    bias, if the layer has one: its gradient is summed as the weight's is.
    """
    if transposed:
        m.hold(shard=weight // z.p)
    m.hold(full=weight)
    if z.gated:
        m.touch(2 * active)
    m.hold(active=active, grad_full=weight)
    if z.half_type:
        m.hold(grad_wide=z.wide(weight))
        m.drop("grad_full")
    m.hold(reduced=z.wide(weight) // z.p)
    m.drop("active", *(["shard"] if transposed else []))
    bias = z.wide_bytes * bias_rows if z.bias else 0
    m.hold(grad_bias=bias, reduced_bias=bias // z.p)
    m.hold(**{f"grad_input_{name}": grad_input})
    m.drop("full")


def _linear_backward_end(m: Ledger, z: LayerSizes, weight: int, *, name: str) -> None:
    m.drop("grad_wide" if z.half_type else "grad_full")
    m.hold(**{f"grad_{name}": weight // z.p})
    m.drop("reduced", "grad_bias", "reduced_bias")


def qkv_forward(m: Ledger, z: LayerSizes, *, in_two_spans: bool = False) -> None:
    """And the gathering of proj: holds q, kv, gate, shard and proj."""
    if z.latent is not None:
        latents.hold_products(m, z)
    else:
        m.hold(weight=z.qkv_weight, mixed=z.mixed)
        if z.bias:
            m.touch(z.qkv_rows(z.g) * z.element_bytes)
        m.drop("weight")
    split_and_rotate(m, z, q=z.q, kv=z.kv, rows=z.positions, in_two_spans=in_two_spans)
    m.hold(shard=z.proj_weight // z.p, proj=z.proj_weight)


def qkv_backward(m: Ledger, z: LayerSizes, *, q_stays: bool = False, k_stays: bool = False) -> None:
    """From the gradients of q, k and v to those of x and the weight; they are all that is held."""
    if z.latent is not None:
        latents.heads_backward(m, z, q_stays=q_stays, k_stays=k_stays)
        _ups_backward(m, z)
        return
    split_backward(m, z, q=z.q, kv=z.kv, rows=z.positions, q_stays=q_stays, k_stays=k_stays)
    rows = z.qkv_rows(z.g)
    _linear_backward(
        m, z, z.qkv_weight, name="qkv", grad_input=z.x, transposed=False, bias_rows=rows
    )
    _linear_backward_end(m, z, z.qkv_weight, name="qkv")


def _ups_backward(m: Ledger, z: LayerSizes) -> None:
    """Of the weights of latents, whose gradients are put together at the end."""
    c_q, c_kv, _ = z.latent_channels
    of_queries, of_keys = z.up_weights
    for name, weight, channels in (("kv", of_keys, c_kv), ("q", of_queries, c_q)):
        up = f"{name}_up"
        grad_input = z.latents(channels)
        _linear_backward(m, z, weight, name=up, grad_input=grad_input, transposed=False)
        _linear_backward_end(m, z, weight, name=up)
        m.drop(f"grad_{name}_product")
    m.hold(grad_latents=z.input)


def down_backward(m: Ledger, z: LayerSizes, channels: int) -> None:
    """Of a weight that makes so many latents of x, in a layer's backward, if it is gathered.

    Beside what the norm made of x, the gradients of x by the other latents and by the sum after
    the attention, and that of all latents, of which without norms each has a view.
    """
    m.hold(normed=z.x, by_others=z.x, by_sum=z.x, grad_latents=z.input)
    weight = channels * z.h * z.element_bytes
    _linear_backward(m, z, weight, name="down", grad_input=z.x, transposed=False)


def proj_forward(m: Ledger, z: LayerSizes, *, copied: bool = False) -> None:
    """And the gate: holds "gated", and the output."""
    values = z.values if z.narrow_values and not copied else 0
    hold_gated(m, z, z.gates, positions=z.positions, values=values)
    m.drop("shard")
    m.hold(output=z.x)


def proj_backward(m: Ledger, z: LayerSizes) -> None:
    _linear_backward(m, z, z.proj_weight, name="proj", grad_input=z.values, transposed=True)
    _linear_backward_end(m, z, z.proj_weight, name="proj")


def gate_of_input_backward(m: Ledger, z: LayerSizes) -> None:
    """Holds "grad_gate"; "grad_input_proj" becomes the gradient of the attention's output."""
    m.release(z.gates + (z.values if z.narrow_values else 0))
    latents.widen(m, z, "grad_input_proj")
    gate_backward(m, z, z.gates, positions=z.positions)
    m.release(z.gates)


def ulysses_z_forward(m: Ledger, z: LayerSizes) -> None:
    packed, repeats = z.q + z.kv_sent, z.kv_sent > z.kv
    m.hold(indices=index_bytes(z))  # of all layers
    qkv_forward(m, z)
    if repeats:
        m.hold(repeated=z.kv_sent)
    m.hold(packed=packed)
    m.drop("q", "kv", *(["repeated"] if repeats else []))
    m.hold(received=packed)
    m.drop("packed")
    if not z.in_order:
        m.hold(ordered=packed)
        m.drop("received")
    m.keep("indices")
    whole_forward(m, z)
    m.keep("received" if z.in_order else "ordered", "lse")
    copied = not z.in_order or z.narrow_values
    m.hold(in_rows=z.values if copied else 0, out_by_sequence=z.values)
    m.drop("in_rows")
    m.keep("out")
    m.hold(flat=0 if z.gate else z.values)
    proj_forward(m, z, copied=True)
    m.keep("out_by_sequence" if z.gate else "flat", "gate", "gated")


def ulysses_z_backward(m: Ledger, z: LayerSizes) -> None:
    packed = z.q + z.kv_sent
    proj_backward(m, z)
    m.release(z.gates)
    gate_backward(m, z, z.gates, positions=z.positions)
    m.release(z.gates + z.values)
    m.hold(by_rank=0 if z.gate else z.values, grad_out=z.values)  # of a gate it lies by rank
    m.drop("by_rank", "grad_input_proj")
    m.touch(0 if z.in_order else z.values)
    latents.widen(m, z, "grad_out")
    whole_backward(m, z, kv=z.kv_sent)
    m.drop("grad_out")
    m.release(packed + z.q + z.lse)
    m.hold(grad_packed=packed)
    m.drop("grad_qkv")
    m.touch(0 if z.in_order else packed)
    m.hold(grad_qkv=packed)
    m.drop("grad_packed")
    if z.kv_sent > z.kv:
        m.hold(summed=z.qkv)
        m.drop("grad_qkv")
        m.hold(grad_qkv=z.qkv)
        m.drop("summed")
    views = z.n == z.g == z.p  # the gradients of one tensor
    qkv_backward(m, z, q_stays=views, k_stays=views)


def local_z_forward(m: Ledger, z: LayerSizes) -> None:
    """Of rows only."""
    assert z.row is not None
    qkv_forward(m, z)
    local_forward(m, z, q=z.q, lse=z.lse, block=z.row.piece_beside, rows=z.rows)
    m.keep("q", "kv", "lse")
    proj_forward(m, z)
    m.keep("out", "gate", "gated")


def local_z_backward(m: Ledger, z: LayerSizes) -> None:
    assert z.row is not None
    proj_backward(m, z)
    gate_of_input_backward(m, z)
    block, copy = z.row.piece_beside, z.lse if z.n > 1 else 0
    local_backward(m, z, q=z.q, kv=z.kv, lse=z.lse, lse_copy=copy, block=block, rows=z.rows)
    m.drop("grad_input_proj")
    m.release(z.q + z.kv + z.q + z.lse)
    qkv_backward(m, z)


def megatron_cz_forward(m: Ledger, z: LayerSizes) -> None:
    if swaps(m.rank, z):
        m.hold(swapped=z.input)
        m.touch(second_half(z, z.input))
    qkv_forward(m, z, in_two_spans=in_two_spans(m.rank, z))
    m.hold(packed=z.kv)
    m.drop("kv")
    ring_forward(m, z, q=z.q, kv=z.kv, lse=z.lse)
    m.keep("lse")
    proj_forward(m, z)
    m.drop("proj")
    if swaps(m.rank, z):
        m.touch(z.x + second_half(z, z.x))
        m.keep("swapped")
    m.keep("q", "packed", "out", "gate", "gated")


def megatron_cz_backward(m: Ledger, z: LayerSizes) -> None:
    if swaps(m.rank, z):
        m.hold(grad=z.x)
        m.touch(second_half(z, z.x))
    proj_backward(m, z)
    if swaps(m.rank, z):
        m.drop("grad")
    gate_of_input_backward(m, z)
    ring_backward(m, z, q=z.q, kv=z.kv, lse=z.lse, heads=z.n)
    m.drop("grad_input_proj")
    m.release(z.q + z.kv + z.q + z.lse)
    qkv_backward(m, z, k_stays=True)
