"""Attention on packed rows between its projections: local_attention.py, routes.py, order.py.

Every document is a block of its own, whose results go into room for all queries, and gradients into
room for all keys too: of the elements' dtype where no two blocks have rows in common, as of
documents that are whole on a rank, else of the accumulation dtype.
"""

from __future__ import annotations

from megatron_paradyse.strategies.row_sizes import RowSizes
from megatron_paradyse.strategies.sizes import LayerSizes, Ledger
from megatron_paradyse.strategies.walks.steps import INDEX_BYTES, lse_copy


def local_forward(m: Ledger, z: LayerSizes, *, q: int, lse: int, block: int, rows: int) -> None:
    """Holds "out" and "lse". block: tokens of the largest block, of so many; 0: it is alone."""
    m.hold(out=q, lse=lse)
    m.touch((q + lse) * block // rows)


def local_backward(
    m: Ledger, z: LayerSizes, *, q: int, kv: int, lse: int, lse_copy: int, block: int, rows: int
) -> None:
    """Holds the gradients of q and kv, "grad_qkv"."""
    if not block:
        m.touch(lse_copy + q + kv + z.kernel_bytes)
        m.hold(grad_qkv=q + kv)
        return
    m.hold(grad_qkv=q + kv)
    m.touch((q + kv + lse) * block // rows + z.kernel_bytes)


def routed_forward(m: Ledger, z: LayerSizes, row: RowSizes, *, q: int, kv: int, lse: int) -> None:
    """Over a chunk that is there: holds "out" and "lse"."""
    if not z.keys_received:
        local_forward(m, z, q=q, lse=lse, block=row.piece_beside, rows=z.rows)
        return
    first, in_use, *_ = (of_tokens(z, kv, tokens) for tokens in row.moments)
    m.hold(wide_out=z.wide(q), lse=lse)
    m.touch(max(first, in_use if not row.call else 0) + _merged(z, row.held, q=q, lse=lse))
    m.touch(first + of_tokens(z, q + lse, row.piece_beside))
    m.touch(in_use + _merged(z, row.crossing, q=q, lse=lse))
    crossing = of_tokens(z, q + lse, row.crossing or row.held)
    m.touch(in_use + (crossing + q if z.half_type else 0))  # room that was narrow
    m.touch(q if z.half_type else 0)
    m.drop("wide_out")
    m.hold(out=q)


def _merged(z: LayerSizes, tokens: int, *, q: int, lse: int) -> int:
    """A result of so many queries, beside the one that it becomes part of."""
    block, block_lse = of_tokens(z, q, tokens), of_tokens(z, lse, tokens)
    return block + 2 * block_lse + max(block_lse, z.wide(block) if z.half_type else 0)


def routed_backward(m: Ledger, z: LayerSizes, row: RowSizes, *, q: int, kv: int, lse: int) -> None:
    """Holds the gradients of q and kv, "grad_qkv"."""
    if not z.keys_received:
        local_backward(m, z, q=q, kv=kv, lse=lse, lse_copy=0, block=row.piece, rows=z.rows)
        return
    m.hold(grad_q=z.wide(q), grad_kv=z.wide(kv))
    m.touch(of_tokens(z, q + kv + lse, row.piece) + z.kernel_bytes)
    _steps_backward(m, z, row, q=q, kv=kv, lse=lse)
    m.touch(q + kv if z.half_type else 0)
    m.drop("grad_q", "grad_kv")
    m.hold(grad_qkv=q + kv)


def _steps_backward(m: Ledger, z: LayerSizes, row: RowSizes, *, q: int, kv: int, lse: int) -> None:
    """Gradients of chunks: computed, being sent, and coming, in the accumulation dtype."""
    block = _block_over_keys(z, row, q=q, kv=kv, lse=lse)
    first, in_use, gradients, sent, _ = (of_tokens(z, kv, keys) for keys in row.moments)
    m.hold(chunks=first)
    m.touch(of_tokens(z, q + kv + lse, row.piece) + z.kernel_bytes)
    m.drop("chunks")
    m.hold(chunks=in_use)
    m.touch(max(z.wide(gradients) + block, z.wide(sent)))
    m.drop("chunks")
    m.touch(z.wide(sent) + (q if z.half_type else 0))


def _block_over_keys(z: LayerSizes, row: RowSizes, *, q: int, kv: int, lse: int) -> int:
    """Of gradients of queries that see keys that came, and of these."""
    if row.crossing:
        keys = of_tokens(z, kv, keys_coming(z, row))
        return of_tokens(z, q + lse, row.crossing) + keys + z.crossing_kernel_bytes
    more_queries = of_tokens(z, q, row.held) + of_tokens(z, kv, row.piece)
    more_keys = of_tokens(z, q, row.piece) + of_tokens(z, kv, row.held)
    return max(more_queries, more_keys) + of_tokens(z, lse, row.held) + z.kernel_bytes


def keys_coming(z: LayerSizes, row: RowSizes) -> int:
    """Tokens whose keys one step of the exchange brings."""
    return min(z.keys_received, row.keys_sent)


def of_tokens(z: LayerSizes, num_bytes: int, tokens: int) -> int:
    """Of the bytes of a rank's rows, those of so many tokens."""
    return num_bytes * tokens // z.rows


def whole_forward(m: Ledger, z: LayerSizes) -> None:
    """Of a rank's heads, all tokens: holds "out" and "lse"."""
    local_forward(m, z, q=z.q, lse=z.lse, block=z.row.longest if z.row else 0, rows=z.s)


def whole_backward(m: Ledger, z: LayerSizes, *, kv: int) -> None:
    """Holds "grad_qkv"."""
    block = z.row.longest if z.row else 0
    copy = lse_copy(z)
    if z.row is None:
        key_heads = kv // (2 * z.s * z.b * z.d * z.element_bytes)
        copy += z.flash_bytes(z.n // z.p, key_heads, queries=z.s, keys=z.s)
    local_backward(m, z, q=z.q, kv=kv, lse=z.lse, lse_copy=copy, block=block, rows=z.s)


def index_bytes(z: LayerSizes) -> int:
    """Of each of all tokens: where its row is, and which it is."""
    return 0 if z.in_order else 2 * INDEX_BYTES * z.s
