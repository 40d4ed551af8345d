"""A ring attention as a rank walks it (ring_attention.py, ring.py): its blocks, step by step.

When causal, ranks hold half chunks (balanced_spans): an early and a late one, whose numbers sum to
2p-1. So of another rank's keys, either all queries see the earlier half, or the later half of the
queries sees all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_paradyse.strategies.sizes import LayerSizes, Ledger
from megatron_paradyse.strategies.walks.rows import routed_backward, routed_forward


class _Step(NamedTuple):
    """Over keys of another rank: chunks that are there, and positions in the block."""

    chunks: int
    is_first: bool
    queries: int
    keys: int


def swaps(rank: int, z: LayerSizes) -> bool:
    """Whether the rank swaps half of its chunk: not of rows; not the middle one of odd p."""
    return z.row is None and z.causal and 2 * rank + 1 != z.p


def in_two_spans(rank: int, z: LayerSizes) -> bool:
    """Whether the halves that the rank then holds do not touch, as those in the middle do."""
    return swaps(rank, z) and z.positions > 1 and 2 * rank != z.p


def second_half(z: LayerSizes, num_bytes: int) -> int:
    """Of the bytes of a chunk, those of its second half, which is swapped."""
    return _of_positions(z, num_bytes, z.positions // 2)


def ring_forward(m: Ledger, z: LayerSizes, *, q: int, kv: int, lse: int) -> None:
    """Over a chunk that is there: holds the output, "out", and "lse".

    Beside the rank's own chunk there are the one in use and the next.
    """
    if z.row is not None:
        routed_forward(m, z, z.row, q=q, kv=kv, lse=lse)
        return
    m.hold(wide_out=z.wide(q), lse=lse)
    for step in set(_steps(m, z)):
        block, block_lse = (_of_positions(z, whole, step.queries) for whole in (q, lse))
        m.hold(chunks=step.chunks * kv, block=block, block_lse=block_lse, weight=block_lse)
        m.touch(max(block_lse, z.wide(block) if z.half_type else 0))
        m.drop("block", "block_lse", "weight", "chunks")
    if z.half_type:
        m.touch(q)
    m.drop("wide_out")
    m.hold(out=q)


def ring_backward(m: Ledger, z: LayerSizes, *, q: int, kv: int, lse: int, heads: int) -> None:
    """Holds the gradients of q and kv, "grad_qkv": one buffer each.

    Gradients of a chunk, in the accumulation dtype: computed, arriving, and being sent. heads: of
    the forward's queries, even if this takes fewer.
    """
    if z.row is not None:
        routed_backward(m, z, z.row, q=q, kv=kv, lse=lse)
        return
    wide_kv = z.wide(kv)
    of_call = lse // (z.rows * z.wide_bytes), kv // (2 * z.rows * z.d * z.element_bytes)  # heads

    def touch_block(queries: int, keys: int) -> None:
        grads = _of_positions(z, q, queries) + _of_positions(z, kv, keys)
        # The lse [b, heads, s/p] of the CPU kernel has the heads last: is a part of it contiguous?
        copied = heads > 1 or (queries < z.positions and z.b > 1)
        grads += _of_positions(z, lse, queries) if copied else 0
        m.touch(grads + z.flash_bytes(*of_call, queries=queries, keys=keys))

    m.hold(grad_q=z.wide(q))
    for step in set(_steps(m, z)):
        m.hold(chunks=step.chunks * kv, grad_kv=wide_kv, hops=0 if step.is_first else 2 * wide_kv)
        touch_block(step.queries, step.keys)
        m.drop("chunks", "grad_kv", "hops")
    m.hold(grad_kv=wide_kv, coming=wide_kv, sent=wide_kv)
    touch_block(z.positions, z.positions)
    m.drop("coming", "sent")
    if z.half_type:
        m.touch(q + kv)
    m.drop("grad_q", "grad_kv")
    m.hold(grad_qkv=q + kv)


def _steps(m: Ledger, z: LayerSizes) -> Iterator[_Step]:
    for i in range(1, z.p):
        source, chunks = (m.rank - i) % z.p, 2 if i < z.p - 1 else 1
        queries = keys = z.positions
        if z.causal and _early(source, z.p) < _early(m.rank, z.p):
            keys = _early_positions(z, source)
        elif z.causal:
            queries = z.positions - _early_positions(z, m.rank)
        yield _Step(chunks, i == 1, queries, keys)


def _early(rank: int, p: int) -> int:
    """Which of the 2p half chunks is the earlier that a rank holds."""
    return min(2 * rank, 2 * (p - 1 - rank) + 1)


def _early_positions(z: LayerSizes, rank: int) -> int:
    """The first half of a chunk has the odd position."""
    half = z.positions // 2
    return z.positions - half if 2 * rank < z.p else half


def _of_positions(z: LayerSizes, num_bytes: int, positions: int) -> int:
    """Of the bytes of a chunk, those of some of its positions."""
    return num_bytes // z.positions * positions
