"""Norms of queries and keys (heads.py): what they keep, and what they need for a moment.

RMSNorm and L2 keep their input and go in tiles of rows, as in rms_norm.py, or are one kernel. A
LayerNorm in a half type goes in float32 where it is not one kernel, and keeps a copy of its input.
"""

from __future__ import annotations

from megatron_paradyse.strategies import sizes
from megatron_paradyse.strategies.sizes import LayerSizes, Ledger


def norm_heads(m: Ledger, z: LayerSizes, *, q: int, kv: int, has_graph: bool) -> None:
    """If there are norms: holds their inputs, "before_q" and "before_k", which the caller has.

    Keeps the rest. has_graph: whether a backward follows; else nothing is kept.
    """
    if z.head_norm is None:
        return
    let_go = m.keep if has_graph else m.drop
    for name, size in (("q", q), ("k", kv // 2)):
        copied, statistics = z.wide(size) if _copies(z) else 0, _statistics(z, size)
        m.hold(of_norm=copied + statistics)
        if copied:
            m.touch(copied)
            let_go("of_norm")
        m.hold(**{f"before_{name}": size})  # beside which q or k is what has been normalised
        if copied:
            m.touch(copied)
        else:
            m.touch(_tiles(z, size, in_forward=True))
            let_go("of_norm")


def end_norms(m: Ledger, z: LayerSizes, *, has_graph: bool) -> None:
    """The caller lets go of what norm_heads holds: what a norm keeps stays."""
    if z.head_norm is not None:
        (m.keep if has_graph and not _copies(z) else m.drop)("before_q", "before_k")


def norms_backward(
    m: Ledger, z: LayerSizes, *, q: int, kv: int, q_stays: bool = False, k_stays: bool = False
) -> None:
    """Holds the gradients of what was normalised, "unnormed_k" and "unnormed_q", where those of q
    and k stay: else they are let go of as they are used.
    """
    if z.head_norm is None:
        return
    for name, size, stays in (("k", kv // 2, k_stays), ("q", q, q_stays)):
        if _copies(z):
            m.touch(2 * z.wide(size) - (0 if stays else size))
        else:
            m.touch(size + _tiles(z, size, in_forward=False))
        m.hold(**{f"unnormed_{name}": size if stays else 0})
        m.release((z.wide(size) if _copies(z) else size) + _statistics(z, size))


def _copies(z: LayerSizes) -> bool:
    return z.head_norm == "layernorm" and z.half_type and not z.fused_norms


def _statistics(z: LayerSizes, size: int) -> int:
    """Of each head of a row."""
    return (2 if z.head_norm == "layernorm" else 1) * z.wide(size) // z.d


def _tiles(z: LayerSizes, size: int, *, in_forward: bool) -> int:
    """What is wider than a norm's input, or as wide; and means of squares."""
    if z.fused_norms or z.head_norm == "layernorm":
        return 0
    weighed, widened = z.head_norm == "rmsnorm", z.half_type
    tensors = (1 if in_forward else 3) + (weighed or widened)
    wide = min(z.wide(size), sizes.NORM_TILE_ELEMENTS * z.wide_bytes)
    means = in_forward and (widened or not weighed)
    return tensors * wide + (wide // z.d if means else 0)
