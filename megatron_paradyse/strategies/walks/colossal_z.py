"""ColossalZ's attention, whose ranks hold whole rows of scores: strategies/colossal_z.py."""

from __future__ import annotations

from megatron_paradyse.strategies.row_sizes import RowSizes
from megatron_paradyse.strategies.sizes import LayerSizes, Ledger
from megatron_paradyse.strategies.walks.rows import keys_coming, of_tokens
from megatron_paradyse.strategies.walks.steps import INDEX_BYTES
from megatron_paradyse.strategies.walks.zero import (
    gate_of_input_backward,
    proj_backward,
    proj_forward,
    qkv_backward,
    qkv_forward,
)


def forward(m: Ledger, z: LayerSizes) -> None:
    scores = _columns(z) * z.rows * z.n * z.element_bytes
    one = z.kv // 2  # k, or v
    moves_q, moves_kv = _moves_heads(z)
    qkv_forward(m, z)
    m.hold(q_by_head=z.q if moves_q else 0, kv_by_head=z.kv if moves_kv else 0)
    m.hold(scores=z.wide(scores))
    if z.row is None:
        _scores_of_chunks(m, z, one)
        chunks = min(z.p - 1, 2) * one
    else:
        _scores_of_blocks(m, z, z.row)
        first, in_use, *_ = z.row.moments
        chunks = of_tokens(z, one, max(first, in_use))
    if z.half_type:
        m.touch(scores)
    m.drop("scores")
    m.hold(probs=scores, chunks=chunks, wide_out=z.wide(z.q))
    m.touch(z.q)
    m.drop("chunks")
    if (z.half_type or moves_q) and not _stays_heads_first(z):
        m.hold(out=z.q)
        m.drop("wide_out")
    else:
        m.drop("wide_out")
        m.hold(out=z.q)
    m.keep("q_by_head" if moves_q else "q", "kv_by_head" if moves_kv else "kv", "probs")
    m.drop("q" if moves_q else "q_by_head", "kv" if moves_kv else "kv_by_head")
    proj_forward(m, z)
    (m.drop if z.narrow_values else m.keep)("out")
    m.keep("gate", "gated")


def _columns(z: LayerSizes) -> int:
    """Of score rows: the keys that the rank has, its own and those that come."""
    return z.s if z.row is None else z.positions + z.keys_received


def _scores_of_chunks(m: Ledger, z: LayerSizes, one: int) -> None:
    chunk = z.rows * z.n * z.positions * z.element_bytes
    m.hold(chunks=one)
    m.touch(z.wide(chunk) + (_mask(z.positions, z.positions) if z.causal else 0))
    m.hold(chunk_in_use=one if z.p > 2 else 0)
    m.touch(_product(z, chunk))
    m.drop("chunks", "chunk_in_use")


def _scores_of_blocks(m: Ledger, z: LayerSizes, row: RowSizes) -> None:
    """Queries of a part of the rows are copied where several heads share a key's."""
    own = [(row.piece, row.piece)]
    coming = (row.crossing, keys_coming(z, row)) if row.crossing else (row.piece, row.held)
    first, in_use, *_ = row.moments
    m.hold(chunks=of_tokens(z, z.kv // 2, max(first, in_use)))
    for queries, keys in (*own, coming):
        scores = z.n * queries * keys * z.element_bytes
        copied = max(queries, row.held) if z.n > z.g else 0
        if row.call and copied == z.rows:  # they are all
            copied = 0
        m.touch(_product(z, scores) + z.q * copied // z.rows)
    for queries, keys in (*own, coming) if row.call else own:
        scores = z.n * queries * keys * z.element_bytes
        m.touch(z.wide(scores) + (_mask(queries, keys, windowed=row.call > 0) if z.causal else 0))
    m.drop("chunks")


def _product(z: LayerSizes, scores: int) -> int:
    """As it is made, and in the accumulation dtype before and after it is scaled."""
    return scores + z.wide(scores) * (2 if z.half_type else 1)


def _moves_heads(z: LayerSizes) -> tuple[bool, bool]:
    """Whether q, and k and v, are copied as heads come first: not of one head of one sequence."""
    return z.b * z.n > 1, z.b * z.g > 1


def _stays_heads_first(z: LayerSizes) -> bool:
    """Whether nothing copies the output for the heads to come last: a gate takes it as it is."""
    return z.gate and not z.half_type


def _mask(queries: int, keys: int, *, windowed: bool = False) -> int:
    """Their positions and distances, and what is hidden: of a window, and in all."""
    scores = queries * keys
    return INDEX_BYTES * (scores + queries + keys) + scores * (2 if windowed else 1)


def backward(m: Ledger, z: LayerSizes) -> None:
    scores = _columns(z) * z.rows * z.n * z.element_bytes
    if z.row is not None:
        _rows_backward(m, z, z.row, scores)
        return
    chunk, one = scores // z.p, z.kv // 2
    chunks, wide_chunk = min(z.p - 2, 2) * one, z.wide(chunk)
    narrow_chunk = chunk if z.half_type else 0
    narrow_one = one if z.half_type else 0
    proj_backward(m, z)
    gate_of_input_backward(m, z)
    m.release(0 if z.narrow_values else z.q)
    moves = _moves_heads(z)[0] and not _stays_heads_first(z)
    m.hold(heads_first=z.q if moves else 0, grad_scores=z.wide(scores), chunks=chunks)
    m.hold(coming=z.wide(one), sent=z.wide(one))
    m.touch(chunk + (wide_chunk if z.half_type else 0))
    m.touch(wide_chunk + z.wide(one) + narrow_one)
    m.drop("sent")
    m.hold(grad_q=z.wide(z.q), row_sums=z.lse)
    m.touch(narrow_chunk + z.q)
    m.hold(coming_k=z.wide(one), sent_k=z.wide(one))
    m.touch(narrow_chunk + max(z.q, z.wide(one) + narrow_one))
    m.drop("heads_first", "grad_scores", "chunks", "coming", "coming_k", "sent_k")
    m.drop("grad_q", "row_sums", "grad_input_proj")
    m.release(z.qkv + scores)
    m.hold(grad_qkv=z.qkv)
    qkv_backward(m, z)


def _rows_backward(m: Ledger, z: LayerSizes, row: RowSizes, scores: int) -> None:
    """backward of packed rows."""
    one, narrow = z.kv // 2, 1 if z.half_type else 0
    of_key = z.rows * z.n * z.element_bytes
    chunk, coming = (of_key * tokens for tokens in (z.positions, keys_coming(z, row)))
    keys = of_tokens(z, one, keys_coming(z, row))
    first, in_use, gradients, sent, _ = (of_tokens(z, one, tokens) for tokens in row.moments)
    proj_backward(m, z)
    gate_of_input_backward(m, z)
    m.release(0 if z.narrow_values else z.q)
    moves = _moves_heads(z)[0] and not _stays_heads_first(z)
    m.hold(heads_first=z.q if moves else 0, grad_scores=z.wide(scores), chunks=first)
    m.touch(chunk + narrow * z.wide(chunk))
    m.hold(own_v=z.wide(one))
    m.touch(z.wide(chunk) + narrow * one)
    m.drop("chunks")
    m.touch(in_use + coming + narrow * z.wide(coming) + z.wide(gradients))
    m.touch(in_use + z.wide(coming) + narrow * keys + z.wide(gradients))
    m.touch(in_use + z.wide(sent))  # a chunk is there while its gradient begins its way back
    m.hold(hops=z.wide(sent), grad_q=z.wide(z.q), row_sums=z.lse, own_k=z.wide(one))
    m.touch(first + narrow * chunk + max(z.q - z.wide(one), narrow * one))
    m.touch(in_use + narrow * coming + z.wide(gradients) + max(z.q, narrow * keys))
    m.touch(in_use + narrow * coming + z.wide(sent))
    m.touch(z.wide(sent) + z.q)  # of a step without keys there are gradients of queries too
    m.touch(z.wide(sent) + narrow * z.q)
    m.drop("heads_first", "grad_scores", "hops")
    m.touch(narrow * z.qkv)
    m.drop("grad_q", "row_sums", "own_k", "own_v", "grad_input_proj")
    m.release(z.qkv + scores)
    m.hold(grad_qkv=z.qkv)
    qkv_backward(m, z)
