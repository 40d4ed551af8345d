"""Steps that several strategies take: heads and RoPE, the middle of an MLP."""

from __future__ import annotations

from megatron_paradyse.strategies import sizes
from megatron_paradyse.strategies.sizes import LayerSizes, Ledger
from megatron_paradyse.strategies.walks.head_norms import end_norms, norm_heads, norms_backward

INDEX_BYTES = 8  # of a position or a row's number


def split_and_rotate(
    m: Ledger,
    z: LayerSizes,
    *,
    q: int,
    kv: int,
    rows: int,
    in_two_spans: bool = False,
    mixed_stays: bool = False,
    has_graph: bool = True,
) -> None:
    """The end of qkv: holds q, kv, gate; drops the mixed tensor that it splits, unless it stays."""
    m.hold(q=q, kv=kv, gate=q if z.gate else 0)
    if not mixed_stays:
        m.drop("mixed")
    normalise_and_rotate(
        m, z, q=q, kv=kv, rows=rows, in_two_spans=in_two_spans, has_graph=has_graph
    )


def normalise_and_rotate(
    m: Ledger,
    z: LayerSizes,
    *,
    q: int,
    kv: int,
    rows: int,
    in_two_spans: bool = False,
    has_graph: bool = True,
) -> None:
    """Keeps what norms need, and the cosines and sines of `rows` positions if heads are rotated.

    in_two_spans: positions whose angles are copied together. has_graph: else nothing is kept for a
    backward.
    """
    norm_heads(m, z, q=q, kv=kv, has_graph=has_graph)
    if z.rope_channels:
        of_row = z.row is not None and rows == z.positions and not z.in_order
        in_spans = in_two_spans or of_row
        m.hold(
            angles=rope_bytes(z, rows), float32_angles=4 * z.rope_channels * rows if in_spans else 0
        )
        # Beside the result: a product, its other factor and that factor's product.
        m.touch(q + 3 * q * z.rope_channels // z.d)
        m.hold(rotated_q=0 if z.head_norm else q)  # the caller has what is rotated without a norm
        m.hold(rotated_k=kv // 2)
        m.touch(3 * kv // 2 * z.rope_channels // z.d)
        m.drop("rotated_q", "rotated_k", "float32_angles")
        (m.keep if has_graph else m.drop)("angles")
    end_norms(m, z, has_graph=has_graph)


def rope_bytes(z: LayerSizes, rows: int) -> int:
    """Cosines and sines."""
    return 2 * rows * z.rope_channels * z.element_bytes


def split_backward(
    m: Ledger,
    z: LayerSizes,
    *,
    q: int,
    kv: int,
    rows: int,
    q_stays: bool = False,
    k_stays: bool = False,
) -> None:
    """Drops the gradients of q, k, v ("grad_qkv") and of the gate; holds that of the mixed tensor.

    q_stays, k_stays: of the gradients; for turning that of k does not free a view, and a caller may
    hold both.
    """
    turn_backward(m, z, q=q, kv=kv, rows=rows, q_stays=q_stays, k_stays=k_stays)
    anew = ["turned_q", "turned_k"]
    if z.head_norm:
        turns = z.rope_channels > 0  # whose results norms let go of
        stay = {"q_stays": q_stays and not turns, "k_stays": k_stays and not turns}
        norms_backward(m, z, q=q, kv=kv, **stay)
        anew += ["unnormed_q", "unnormed_k"]
    m.hold(grad_mixed=q + kv + (q if z.gate else 0))
    m.drop("grad_qkv", "grad_gate", *anew)


def turn_backward(
    m: Ledger,
    z: LayerSizes,
    *,
    q: int,
    kv: int,
    rows: int,
    q_stays: bool = False,
    k_stays: bool = False,
) -> None:
    """Holds the gradients of what RoPE turned, "turned_q" and "turned_k", where those of q and k
    stay: else they are let go of as they are used.
    """
    turns = z.rope_channels > 0
    m.hold(turned_q=q if turns and q_stays else 0, turned_k=kv // 2 if turns and k_stays else 0)
    if turns:
        # Beside the result: two products and a quarter turn, made of a half and the whole.
        m.touch((0 if q_stays else q) + 7 * q * z.rope_channels // (2 * z.d))
        m.release(rope_bytes(z, rows))


def hold_gated(m: Ledger, z: LayerSizes, gates: int, *, positions: int, values: int = 0) -> None:
    """Holds the output that its gate has passed, "gated"; gates: bytes of so many positions.

    values: of narrow ones, which are copied there.
    """
    m.hold(gated=gates + values)
    m.touch(_sigmoids(z, gates, positions))


def gate_backward(m: Ledger, z: LayerSizes, gates: int, *, positions: int) -> None:
    """Holds "grad_gate"; that of the output takes the place of that of the gated one."""
    m.hold(grad_gate=gates)
    m.touch(gates + _sigmoids(z, gates, positions))


def _sigmoids(z: LayerSizes, gates: int, positions: int) -> int:
    """Of a tile, or of all."""
    return z.wide(gates) * min(positions, sizes.positions_of_tile(z.b)) // positions


def lse_copy(z: LayerSizes) -> int:
    """The CPU kernel's lse of several heads has strides; the backward's is contiguous."""
    return z.lse if z.n > z.p else 0


def activate(m: Ledger, z: LayerSizes, active: int) -> None:
    """Holds fc2's input, "active"; gated, the activated gate is there for a moment."""
    m.touch(2 * active if z.gated else active)
    m.hold(active=active)


def activation_gradient_bytes(z: LayerSizes, active: int) -> int:
    """activation_gradient above the gradient it is given."""
    return (5 if z.gated else 2) * active


def fc1_output(z: LayerSizes) -> int:
    """What most MLPs keep."""
    return z.rows * z.fc1_rows * z.element_bytes


def fc2_input(z: LayerSizes) -> int:
    return z.rows * z.f * z.element_bytes


def product_piece(z: LayerSizes, rows: int, columns: int) -> int:
    """Of a product that goes into a sum of a wider dtype in pieces of rows (weight_blocks.py)."""
    return min(rows, sizes.TILE_ROWS) * columns * z.element_bytes if z.half_type else 0
