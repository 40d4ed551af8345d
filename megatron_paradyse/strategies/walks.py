"""Workspace by walking each strategy's allocations and releases, in the order of its code.

A walk returns (kept, forward, backward): bytes kept beyond the input and the output, and the peaks
of forward and backward above them. Exact for p > 1 and documents=None; what kernels allocate
inside, and a window's or dropout's masks, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

from megatron_paradyse.strategies.sizes import LayerSizes, Ledger

Walk = Callable[[LayerSizes], tuple[int, int, int]]


def _half_type(z: LayerSizes) -> bool:
    return z.wide_bytes > z.element_bytes


def _split_and_rotate(m: Ledger, z: LayerSizes, *, q: int, kv: int, rows: int) -> None:
    """The end of qkv: holds q and kv, and the cosines and sines of `rows` positions if rotated."""
    m.hold(q=q, kv=kv)
    m.drop("mixed")
    if z.rope_channels:
        m.hold(angles=2 * rows * z.rope_channels * z.element_bytes)
        # Beside the result: a product, its other factor and that factor's product.
        m.hold(rotated_q=q)
        m.touch(3 * q * z.rope_channels // z.d)
        m.hold(rotated_k=kv // 2)
        m.touch(3 * kv // 2 * z.rope_channels // z.d)
        m.drop("rotated_q", "rotated_k")


def _rope_kept(z: LayerSizes, rows: int) -> int:
    return 2 * rows * z.rope_channels * z.element_bytes


def _split_backward(
    m: Ledger, z: LayerSizes, grads: int, *, rows: int, one_buffer: bool = False
) -> None:
    """Gradients of q, k, v -> gradient of the mixed tensor, by rotation and one cat.

    one_buffer: that of k is a view, so that turning it does not free it.
    """
    if z.rope_channels:
        m.hold(turned_k=z.kv // 2 if one_buffer else 0, turned_q=z.q)
        # Beside the result: two products and a quarter turn, made of a half and the whole.
        m.touch(7 * z.q * z.rope_channels // (2 * z.d))
        m.release(_rope_kept(z, rows))
    m.hold(grad_mixed=grads)
    m.drop("grad_qkv", *(["turned_k", "turned_q"] if z.rope_channels else []))


def _zero_linear_backward(
    m: Ledger,
    z: LayerSizes,
    weight: int,
    *,
    name: str,
    grad_input: int,
    transposed: bool,
    active: int = 0,
) -> None:
    """Of zero.py's linear: holds grad_input, and until _end the gradient of the full weight.

    active: bytes of the activation that is run again for the weight's gradient.
    """
    if transposed:
        m.hold(shard=weight // z.p)
    m.hold(full=weight)
    if z.gated:
        m.touch(2 * active)
    m.hold(active=active, grad_full=weight)
    if _half_type(z):
        m.hold(grad_wide=z.wide(weight))
        m.drop("grad_full")
    m.hold(reduced=z.wide(weight) // z.p)
    m.drop("active", *(["shard"] if transposed else []))
    m.hold(**{f"grad_input_{name}": grad_input})
    m.drop("full")


def _lse_copy(z: LayerSizes) -> int:
    """The CPU kernel's lse of several heads has strides; the backward's is contiguous."""
    return z.lse if z.n > z.p else 0


def _zero_linear_backward_end(m: Ledger, z: LayerSizes, weight: int, *, name: str) -> None:
    m.drop("grad_wide" if _half_type(z) else "grad_full")
    m.hold(**{f"grad_{name}": weight // z.p})
    m.drop("reduced")


def _mlp_gradient_peak(z: LayerSizes) -> int:
    """activation_gradient above the gradient it is given, in features of fc2's input."""
    return (5 if z.gated else 2) * z.rows * z.f * z.element_bytes


def _y(z: LayerSizes) -> int:
    """fc1's output, which both MLPs keep."""
    return z.rows * z.fc1_rows * z.element_bytes


def _megatron_ts_mlp(z: LayerSizes) -> tuple[int, int, int]:
    y, active, gathered = _y(z), z.rows * z.f * z.element_bytes, z.p * z.x
    m = Ledger()
    m.hold(gathered=gathered, y=y)
    m.drop("gathered")
    m.touch(2 * active if z.gated else active)
    m.hold(active=active, partial=gathered, output=z.x)
    forward = m.peak - y
    m = Ledger()
    m.hold(gathered=gathered)
    m.touch(2 * active if z.gated else active)
    m.hold(active=active, grad_fc2=z.fc2_weight // z.p)
    m.drop("active")
    m.hold(grad_active=active)
    m.touch(_mlp_gradient_peak(z))
    m.hold(grad_y=y)
    m.drop("grad_active", "gathered")
    m.release(y)
    m.hold(x=gathered, partial=gathered, grad_x=z.x, grad_fc1=z.fc1_weight // z.p)
    return y, forward, m.peak


def _zero_mlp(z: LayerSizes) -> tuple[int, int, int]:
    y, active = _y(z), z.rows * z.f * z.element_bytes
    m = Ledger()
    m.hold(fc1=z.fc1_weight, shard=z.fc2_weight // z.p, fc2=z.fc2_weight, y=y)
    if z.bias:
        m.touch(z.fc1_rows * z.element_bytes)
    m.drop("fc1")
    m.touch(2 * active if z.gated else active)
    m.hold(active=active)
    m.drop("shard")
    m.hold(output=z.x)
    forward = m.peak - y
    m = Ledger()
    _zero_linear_backward(
        m, z, z.fc2_weight, name="fc2", grad_input=active, transposed=True, active=active
    )
    m.touch(_mlp_gradient_peak(z))
    m.hold(grad_y=y)
    m.drop("grad_input_fc2")
    _zero_linear_backward_end(m, z, z.fc2_weight, name="fc2")
    m.release(y)
    _zero_linear_backward(m, z, z.fc1_weight, name="fc1", grad_input=z.x, transposed=False)
    _zero_linear_backward_end(m, z, z.fc1_weight, name="fc1")
    return y, forward, m.peak


def _megatron_ts_attention(z: LayerSizes) -> tuple[int, int, int]:
    gathered, mixed = z.p * z.x, z.qkv
    kv = max(z.kv, 2 * z.s * z.b * z.d * z.element_bytes)  # at least one head each
    angles = _rope_kept(z, z.s)
    kept = z.q + kv + z.q + z.lse + angles
    m = Ledger()
    m.hold(x=gathered, mixed=mixed)
    m.drop("x")
    if z.g < z.p:
        m.hold(by_rank=z.p * mixed, all_heads=z.p * mixed)
        m.touch(z.q + kv)
        m.drop("by_rank", "all_heads")
    _split_and_rotate(m, z, q=z.q, kv=kv, rows=z.s)
    m.hold(out=z.q, lse=z.lse, partial=gathered, output=z.x)
    forward = m.peak - kept
    m = Ledger()
    m.hold(grad=gathered, grad_proj=z.proj_weight // z.p, grad_out=z.q)
    m.drop("grad")
    m.hold(lse=_lse_copy(z), grad_qkv=z.q + kv)
    m.drop("lse", "grad_out")
    m.release(kept - angles)
    if z.g < z.p:
        # Zero-padded to the heads of all ranks, summed up one by one, and scattered.
        m.release(angles)
        m.drop("grad_qkv")
        m.hold(grad_mixed=mixed)
        m.touch(2 * z.p * mixed)
    else:
        _split_backward(m, z, z.q + kv, rows=z.s)
    m.hold(x=gathered, partial=gathered)
    m.hold(grad_x=z.x, grad_weight=z.qkv_weight // z.p)
    return kept, forward, m.peak


def _zero_qkv(m: Ledger, z: LayerSizes) -> None:
    """Of zero.py, and the gathering of proj: holds q, kv, shard and proj."""
    m.hold(weight=z.qkv_weight, mixed=z.qkv)
    if z.bias:
        m.touch((z.n + 2 * z.g) * z.d * z.element_bytes)
    m.drop("weight")
    _split_and_rotate(m, z, q=z.q, kv=z.kv, rows=z.s // z.p)
    m.hold(shard=z.proj_weight // z.p, proj=z.proj_weight)


def _zero_qkv_backward(m: Ledger, z: LayerSizes, *, one_buffer: bool = False) -> None:
    """From the gradients of q, k and v to those of x and the weight; they are all that is held."""
    _split_backward(m, z, z.qkv, rows=z.s // z.p, one_buffer=one_buffer)
    _zero_linear_backward(m, z, z.qkv_weight, name="qkv", grad_input=z.x, transposed=False)
    _zero_linear_backward_end(m, z, z.qkv_weight, name="qkv")


def _zero_proj_backward(m: Ledger, z: LayerSizes) -> None:
    _zero_linear_backward(m, z, z.proj_weight, name="proj", grad_input=z.q, transposed=True)
    _zero_linear_backward_end(m, z, z.proj_weight, name="proj")


def _ulysses_z_attention(z: LayerSizes) -> tuple[int, int, int]:
    sent_heads = lcm(z.g, z.p)
    repeated = z.kv // z.g * sent_heads
    packed = z.q + repeated
    kept = packed + z.q + z.lse + z.q + _rope_kept(z, z.s // z.p)
    m = Ledger()
    _zero_qkv(m, z)
    if sent_heads > z.g:
        m.hold(repeated=repeated)
    m.hold(packed=packed)
    m.drop("q", "kv", *(["repeated"] if sent_heads > z.g else []))
    m.hold(received=packed)
    m.drop("packed")
    m.hold(out=z.q, lse=z.lse, out_by_sequence=z.q, flat=z.q)
    m.drop("shard")
    m.hold(output=z.x)
    forward = m.peak - kept
    m = Ledger()
    _zero_proj_backward(m, z)
    m.release(z.q)
    m.hold(by_rank=z.q, grad_out=z.q)
    m.drop("by_rank", "grad_input_proj")
    m.hold(lse=_lse_copy(z), grads=packed)
    m.drop("lse", "grad_out")
    m.release(packed + z.q + z.lse)
    m.hold(grad_packed=packed)
    m.drop("grads")
    m.hold(grad_qkv=packed)
    m.drop("grad_packed")
    if sent_heads > z.g:
        m.hold(summed=z.qkv)
        m.drop("grad_qkv")
        m.hold(grad_qkv=z.qkv)
        m.drop("summed")
    _zero_qkv_backward(m, z, one_buffer=z.n == z.p)
    return kept, forward, m.peak


def _megatron_cz_attention(z: LayerSizes) -> tuple[int, int, int]:
    swapped = z.x if z.causal else 0
    part = 2 if z.causal else 1  # a block has this share of the queries and of the keys
    kept = swapped + z.q + z.kv + z.q + z.lse + _rope_kept(z, z.s // z.p)
    buffers = min(z.p - 1, 2) * z.kv  # the chunk in use and the next, beside the rank's own
    wide_out = z.wide(z.q)
    m = Ledger()
    m.hold(swapped=swapped)
    _zero_qkv(m, z)
    m.hold(packed=z.kv)
    m.drop("kv")
    m.hold(buffers=buffers, out=wide_out, lse=z.lse)
    m.hold(block=z.q // part, block_lse=z.lse // part, weight=z.lse // part)
    m.touch(max(z.lse // part, wide_out // part if _half_type(z) else 0))
    m.drop("block", "block_lse", "weight", "buffers")
    m.touch(z.kv + (z.q if _half_type(z) else 0))
    m.drop("out", "shard")
    m.hold(result=z.q, output=z.x)
    forward = m.peak - kept
    m = Ledger()
    if z.causal:
        m.hold(grad=z.x)
        m.touch(z.x)
    _zero_proj_backward(m, z)
    if z.causal:
        m.drop("grad")
    wide_kv = z.wide(z.kv)
    m.hold(grad_q=wide_out, buffers=buffers, grad_kv=wide_kv, coming=wide_kv, sent=wide_kv)
    m.touch((z.q + z.kv + z.lse) // part)
    m.drop("buffers", "grad_kv")
    if _half_type(z):
        m.touch(z.q + z.kv)
    m.drop("grad_q", "coming", "sent", "grad_input_proj")
    m.release(z.q + z.kv + z.q + z.lse)
    m.hold(grad_qkv=z.qkv)
    _zero_qkv_backward(m, z, one_buffer=True)
    return kept, forward, m.peak


def _colossal_z_attention(z: LayerSizes) -> tuple[int, int, int]:
    scores = z.rows * z.n * z.s * z.element_bytes
    wide_scores, chunk = z.wide(scores), scores // z.p
    wide_chunk = z.wide(chunk)
    kept = z.qkv + scores + z.q + _rope_kept(z, z.s // z.p)
    one = z.kv // 2  # k, or v
    buffers = min(z.p - 1, 2) * one
    m = Ledger()
    _zero_qkv(m, z)
    m.hold(heads_first=z.qkv, scores=wide_scores, buffers=buffers)
    m.hold(product=chunk)
    m.touch(wide_chunk * (2 if _half_type(z) else 1))
    m.drop("product", "buffers")
    if _half_type(z):
        m.hold(probs=scores)
        m.drop("scores")
    m.hold(buffers=buffers, out=z.wide(z.q))
    m.touch(z.q)
    m.drop("buffers")
    m.hold(result=z.q)
    forward = m.peak - kept
    m = Ledger()
    _zero_proj_backward(m, z)
    m.release(z.q)
    m.hold(heads_first=z.q, grad_scores=wide_scores, buffers=buffers)
    m.hold(coming=z.wide(one), sent=z.wide(one))
    m.touch(chunk + (wide_chunk if _half_type(z) else 0))
    m.touch(wide_chunk + one + (z.wide(one) if _half_type(z) else 0))
    m.hold(grad_q=z.wide(z.q), row_sums=z.lse)
    m.touch((chunk if _half_type(z) else 0) + z.q)
    m.hold(coming_k=z.wide(one), sent_k=z.wide(one))
    m.touch((chunk if _half_type(z) else 0) + max(z.q, one + z.wide(one) * _half_type(z)))
    m.drop("heads_first", "grad_scores", "buffers", "coming", "sent", "coming_k", "sent_k")
    m.drop("grad_q", "row_sums", "grad_input_proj")
    m.release(z.qkv + scores)
    m.hold(grad_qkv=z.qkv)
    _zero_qkv_backward(m, z)
    return kept, forward, m.peak


WALKS: dict[tuple[str, str], Walk] = {
    ("megatron_ts", "attention"): _megatron_ts_attention,
    ("megatron_ts", "mlp"): _megatron_ts_mlp,
    ("ulysses_z", "attention"): _ulysses_z_attention,
    ("megatron_cz", "attention"): _megatron_cz_attention,
    ("colossal_z", "attention"): _colossal_z_attention,
    ("ulysses_z", "mlp"): _zero_mlp,
    ("megatron_cz", "mlp"): _zero_mlp,
    ("colossal_z", "mlp"): _zero_mlp,
}
