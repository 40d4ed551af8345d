"""The three Triton kernels of fused_tiles.py, and what they share. Imported where Triton is.

Strides are of sequences, heads and rows; channels lie side by side. Positions, and what dropout
hashes, are as in BlockRule and dropout.py: 32-bit values come as signed ones of the same bits.
"""

import triton
import triton.language as tl

UNSPECIALISED = (
    *("sq", "sk", "q_start", "k_start", "window", "first_sequence", "first_head"),
    *("seed", "threshold"),
)


@triton.jit
def mix(x):
    """dropout._mix, of uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def hash_rows(row, seed, sequence, head):
    """Of queries at these positions."""
    base = mix(seed.to(tl.uint32) + sequence.to(tl.uint32))
    base = mix(base + head.to(tl.uint32))
    return mix(base + row.to(tl.uint32))


@triton.jit
def kept(row_hash, position, threshold, FIRST_KEY: tl.constexpr):
    """Which of [rows, columns] dropout keeps."""
    column_hash = mix((position + FIRST_KEY).to(tl.uint32))
    entry = mix(row_hash[:, None] ^ column_hash[None, :])
    return entry >= threshold.to(tl.uint32)


@triton.jit
def visible(row, column, sq, sk, distance, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """distance: of row 0 from column 0."""
    seen = (row < sq)[:, None] & (column < sk)[None, :]
    apart = row[:, None] - column[None, :] + distance
    if CAUSAL:
        seen &= apart >= 0
    if WINDOW:
        seen &= apart < window
    return seen


@triton.jit
def load(at, row, count, stride, D: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH], 0 beyond count and D."""
    channel = tl.arange(0, WIDTH)
    inside = (row < count)[:, None] & (channel < D)[None, :]
    return tl.load(at + row.to(tl.int64)[:, None] * stride + channel[None, :], inside, other=0.0)


@triton.jit
def save(at, value, row, count, stride, D: tl.constexpr, WIDTH: tl.constexpr):
    channel = tl.arange(0, WIDTH)
    inside = (row < count)[:, None] & (channel < D)[None, :]
    place = at + row.to(tl.int64)[:, None] * stride + channel[None, :]
    tl.store(place, value.to(at.dtype.element_ty), inside)


@triton.jit
def keys_of(
    first, sk, distance, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From where to where a tile of queries sees keys."""
    start, stop = 0, sk
    if CAUSAL:
        stop = tl.minimum(sk, first + ROWS + distance)
    if WINDOW:
        start = tl.maximum(0, first + distance - window + 1) // COLUMNS * COLUMNS
    return start, stop


@triton.jit(do_not_specialize=UNSPECIALISED)
def forward(
    q, k, v, out, lse,
    sq, sk, q_start, k_start, window, first_sequence, first_head, seed, threshold,
    scale, keep_scale,
    q_b, q_n, q_s, k_b, k_n, k_s, v_b, v_n, v_s, out_b, out_n, out_s,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, FIRST_KEY: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [b, n, sq, d] and lse [b, n, sq] of q [b, n, sq, d], k and v [b, g, sk, d].

    A program has ROWS queries of a head.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    n, s64, h64 = tl.num_programs(1), sequence.to(tl.int64), head.to(tl.int64)
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    distance = q_start - k_start
    kv_head = (head // GROUP).to(tl.int64)
    q_tile = load(q + s64 * q_b + h64 * q_n, row, sq, q_s, D, WIDTH)
    row_hash = hash_rows(row + q_start, seed, sequence + first_sequence, head + first_head)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    start, stop = keys_of(first, sk, distance, window, CAUSAL, WINDOW, ROWS, COLUMNS)
    for begin in range(start, stop, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        k_tile = load(k + s64 * k_b + kv_head * k_n, column, sk, k_s, D, WIDTH)
        v_tile = load(v + s64 * v_b + kv_head * v_n, column, sk, v_s, D, WIDTH)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        seen = visible(row, column, sq, sk, distance, window, CAUSAL, WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        bound = tl.where(higher > float("-inf"), higher, 0.0)  # of a row that sees nothing yet
        probs = tl.exp(scores - bound[:, None])
        before = tl.exp(largest - bound)
        total = total * before + tl.sum(probs, 1)
        if DROPS:
            probs = tl.where(kept(row_hash, column + k_start, threshold, FIRST_KEY), probs, 0.0)
        sums = sums * before[:, None]
        sums += tl.dot(probs.to(v_tile.dtype), v_tile, input_precision="ieee")
        largest = higher
    some = total > 0.0
    sums = sums * tl.where(some, keep_scale / tl.where(some, total, 1.0), 0.0)[:, None]
    save(out + s64 * out_b + h64 * out_n, sums, row, sq, out_s, D, WIDTH)
    log = tl.where(some, largest + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse + (s64 * n + h64) * sq + row, log, mask=row < sq)


@triton.jit(do_not_specialize=UNSPECIALISED)
def of_queries(
    q, k, v, grad_out, out, lse, sums, grad_q,
    sq, sk, q_start, k_start, window, first_sequence, first_head, seed, threshold,
    scale, keep_scale,
    q_b, q_n, q_s, k_b, k_n, k_s, v_b, v_n, v_s, grad_b, grad_n, grad_s,
    out_b, out_n, out_s, grad_q_b, grad_q_n, grad_q_s,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, FIRST_KEY: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of q, and in sums [b, n, sq] what of_keys needs: rowsum(grad_out * out).

    A program has ROWS queries of a head.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    n, s64, h64 = tl.num_programs(1), sequence.to(tl.int64), head.to(tl.int64)
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    distance = q_start - k_start
    kv_head = (head // GROUP).to(tl.int64)
    q_tile = load(q + s64 * q_b + h64 * q_n, row, sq, q_s, D, WIDTH)
    grad_tile = load(grad_out + s64 * grad_b + h64 * grad_n, row, sq, grad_s, D, WIDTH)
    out_tile = load(out + s64 * out_b + h64 * out_n, row, sq, out_s, D, WIDTH)
    row_sum = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    at = (s64 * n + h64) * sq + row
    tl.store(sums + at, row_sum, mask=row < sq)
    log = tl.load(lse + at, mask=row < sq, other=float("-inf"))
    log = tl.where(log > float("-inf"), log, float("inf"))
    row_hash = hash_rows(row + q_start, seed, sequence + first_sequence, head + first_head)
    grad = tl.zeros([ROWS, WIDTH], tl.float32)
    start, stop = keys_of(first, sk, distance, window, CAUSAL, WINDOW, ROWS, COLUMNS)
    for begin in range(start, stop, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        k_tile = load(k + s64 * k_b + kv_head * k_n, column, sk, k_s, D, WIDTH)
        v_tile = load(v + s64 * v_b + kv_head * v_n, column, sk, v_s, D, WIDTH)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        seen = visible(row, column, sq, sk, distance, window, CAUSAL, WINDOW)
        probs = tl.where(seen, tl.exp(scores - log[:, None]), 0.0)
        grad_probs = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
        if DROPS:
            keep = kept(row_hash, column + k_start, threshold, FIRST_KEY)
            grad_probs = tl.where(keep, grad_probs * keep_scale, 0.0)
        grad_scores = probs * (grad_probs - row_sum[:, None]) * scale
        grad += tl.dot(grad_scores.to(k_tile.dtype), k_tile, input_precision="ieee")
    save(grad_q + s64 * grad_q_b + h64 * grad_q_n, grad, row, sq, grad_q_s, D, WIDTH)


@triton.jit(do_not_specialize=UNSPECIALISED)
def of_keys(
    q, k, v, grad_out, lse, sums, grad_k, grad_v,
    sq, sk, q_start, k_start, window, first_sequence, first_head, seed, threshold,
    scale, keep_scale,
    q_b, q_n, q_s, k_b, k_n, k_s, v_b, v_n, v_s, grad_b, grad_n, grad_s,
    grad_k_b, grad_k_n, grad_k_s, grad_v_b, grad_v_n, grad_v_s,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, FIRST_KEY: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients of k and v, after of_queries: of all GROUP heads that use them.

    A program has COLUMNS keys of a head.
    """
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    s64, kv64 = sequence.to(tl.int64), kv_head.to(tl.int64)
    n = tl.num_programs(1) * GROUP
    begin = tl.program_id(0) * COLUMNS
    column = begin + tl.arange(0, COLUMNS)
    distance = q_start - k_start
    k_tile = load(k + s64 * k_b + kv64 * k_n, column, sk, k_s, D, WIDTH)
    v_tile = load(v + s64 * v_b + kv64 * v_n, column, sk, v_s, D, WIDTH)
    for_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for_v = tl.zeros([COLUMNS, WIDTH], tl.float32)
    start, stop = 0, sq
    if CAUSAL:
        start = tl.maximum(0, begin - distance) // ROWS * ROWS
    if WINDOW:
        stop = tl.minimum(sq, begin + COLUMNS - 1 + window - distance)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        h64 = head.to(tl.int64)
        for first in range(start, stop, ROWS):
            row = first + tl.arange(0, ROWS)
            q_tile = load(q + s64 * q_b + h64 * q_n, row, sq, q_s, D, WIDTH)
            grad_tile = load(grad_out + s64 * grad_b + h64 * grad_n, row, sq, grad_s, D, WIDTH)
            at = (s64 * n + h64) * sq + row
            log = tl.load(lse + at, mask=row < sq, other=float("-inf"))
            log = tl.where(log > float("-inf"), log, float("inf"))
            row_sum = tl.load(sums + at, mask=row < sq, other=0.0)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
            seen = visible(row, column, sq, sk, distance, window, CAUSAL, WINDOW)
            probs = tl.where(seen, tl.exp(scores - log[:, None]), 0.0)
            grad_probs = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
            used = probs
            if DROPS:
                row_hash = hash_rows(
                    row + q_start, seed, sequence + first_sequence, head + first_head
                )
                keep = kept(row_hash, column + k_start, threshold, FIRST_KEY)
                grad_probs = tl.where(keep, grad_probs * keep_scale, 0.0)
                used = tl.where(keep, probs * keep_scale, 0.0)
            for_v += tl.dot(tl.trans(used.to(grad_tile.dtype)), grad_tile, input_precision="ieee")
            grad_scores = probs * (grad_probs - row_sum[:, None]) * scale
            for_k += tl.dot(tl.trans(grad_scores.to(q_tile.dtype)), q_tile, input_precision="ieee")
    save(grad_k + s64 * grad_k_b + kv64 * grad_k_n, for_k, column, sk, grad_k_s, D, WIDTH)
    save(grad_v + s64 * grad_v_b + kv64 * grad_v_n, for_v, column, sk, grad_v_s, D, WIDTH)
