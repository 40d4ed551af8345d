"""Memory of attention on a packed row where no walk tells: bounds that no rank exceeds.

Workspace is that of one document and upper bounds of what rows may need besides: copies that bring
them into order, gradients of several documents summed in the accumulation dtype, keys that are sent
while others come, and more of these than come to one document within a narrow window; and where a
window or dropout takes the tiled kernel, its tiles of documents that are longer than the halves of
chunks in a ring. What is kept is that of one document, but for ColossalZ's score rows, which have a
column for each key that comes, and for what MegatronTS keeps of rows that are not in the order of
positions.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_paradyse.costs.packed import LOCAL, WHOLE_COLUMNS
from megatron_paradyse.costs.row_sizes import bytes_of_documents, of_length
from megatron_paradyse.costs.table import OperationCosts
from megatron_paradyse.packing.load import Load
from megatron_paradyse.plan import MEGATRON_TS
from megatron_paradyse.strategies import base_name, recomputes
from megatron_paradyse.strategies.accounting import SPLIT_HEADS
from megatron_paradyse.strategies.sizes import LayerSizes
from megatron_paradyse.strategies.walks.rows import index_bytes

TILE = 64  # queries at a time, in strategies/tiled_kernel.py
# Of scores and what is made of them, that it holds at once, forward and backward: and with dropout.
TILES, TILES_WITH_DROPOUT = (3, 4), (7, 8)


def with_row_bytes(
    strategy: str,
    one: OperationCosts,
    sizes: LayerSizes,
    load: Load,
    of_one: Load,
    *,
    least: OperationCosts | None,
    tiled_window: float | None,
    in_one_call: bool = False,
    windowed: bool = False,
    drops: bool = False,
    like: str | None = None,
) -> OperationCosts:
    """The bytes on a row, from those of one document.

    in_one_call: a flash kernel takes all documents that lie side by side. windowed: the loads are
    what a window leaves. drops: there is dropout of attention. of_one: the load of that document.
    least: of a strategy that gathers the same weights and has no score rows; None: not known.
    tiled_window: keys that a query sees, where the tiled kernel runs. like: the strategy of that
    document; None: the same.
    """
    kept, forward, backward = one.kept_bytes, one.forward_bytes, one.backward_bytes
    if base_name(strategy) in WHOLE_COLUMNS:
        more_columns = load.keys_received - of_one.keys_received
        kept, forward, backward = _with_columns(
            strategy, one, sizes, load, more_columns, least, drops=drops
        )
    more_kept, more_forward, more_backward = extra_bytes(
        strategy, sizes, load, of_one, tiled_window, like, drops=drops
    )
    if in_one_call:
        base = base_name(strategy)
        z = of_length(sizes, load)
        more_backward += bytes_of_documents(base, z, load, windowed=windowed)
    return replace(
        one,
        kept_bytes=kept + more_kept,
        forward_bytes=forward + more_forward,
        backward_bytes=backward + more_backward,
    )


def extra_bytes(
    strategy: str,
    sizes: LayerSizes,
    load: Load,
    of_one: Load,
    tiled_window: float | None = None,
    like: str | None = None,
    *,
    drops: bool = False,
) -> tuple[int, int, int]:
    """What a row keeps, and its forward and backward hold above that, beyond one document."""
    base = base_name(strategy)
    z = replace(of_length(sizes, load), in_order=load.in_order)
    kept, forward, backward = 0, 0, 0
    if base in SPLIT_HEADS or base == LOCAL:
        heads = z.q + z.kv_sent
        forward, backward = _of_documents(z, heads, load, z.rows if base == LOCAL else z.s)
        if load.groups > 1:  # keys that are used, that come and that are sent; gradients likewise
            chunks = min(load.groups, 3)
            merged = 2 * z.lse + (z.q if z.half_type else 0)  # what a block adds to wider sums
            forward += heads + z.wide(z.q) + chunks * z.kv_sent + merged
            backward += z.q + chunks * (z.kv_sent + z.wide(z.kv_sent))
        if not load.in_order and base != LOCAL:
            own = base == MEGATRON_TS  # which has its heads' gates and outputs in order too
            gated_by_megatron = z.gate and load.groups == 1  # as its rows lie, and keeps them
            copied = z.narrow_values or (z.gate and not gated_by_megatron)  # what proj keeps
            kept = index_bytes(z) + (z.q if own and not copied else 0)
            forward = max(forward, heads + (z.gates if own else 0))
    else:
        most = max(z.s - z.s // z.p, 1)
        rings = z.p if base == "metp" else 1
        sent = -(-z.kv_sent * min(load.keys_received, most) // (most * rings))
        forward, backward = sent, z.wide(sent)
        if base in WHOLE_COLUMNS:  # products of blocks, which the walk takes with whole columns
            forward += z.kv_sent
        used, used_and_coming = (
            -(-z.kv_sent * _more(load, of_one, chunks * z.rows) // (z.rows * rings))
            for chunks in (1, 2)
        )
        forward += used_and_coming
        backward += used_and_coming + 3 * z.wide(used)  # gradients: made, sent, and coming
        if base not in WHOLE_COLUMNS and of_one.keys_received < z.s - z.s // z.p:
            forward += _beyond_narrow(z, load, of_one, rings)
        if z.p == 1 and base not in WHOLE_COLUMNS:
            room, sums = _of_one_rank(z, load)
            forward, backward = forward + room, backward + sums
    if tiled_window is not None and base not in (*SPLIT_HEADS, *WHOLE_COLUMNS):
        of_tiles = _more_of_tiles(z, base, base_name(like or strategy), of_one, tiled_window)
        counts = TILES_WITH_DROPOUT if drops else TILES
        forward, backward = (
            held + int(count * of_tiles * z.wide_bytes)
            for held, count in zip((forward, backward), counts, strict=True)
        )
    if not recomputes(strategy):
        return kept, forward, backward
    return 0, kept + forward, kept + max(forward, backward)


def _beyond_narrow(z: LayerSizes, load: Load, of_one: Load, rings: int) -> int:
    """Of a forward, beside one document within a narrow window, whose ranks hold a chunk each.

    Angles of rows are copied together, in float32. Beside the room for all results is that of a
    piece. And of that document few queries meet keys that come; of a row's pieces as many as a rank
    holds have results to be merged.
    """
    angles = 4 * z.rope_channels * z.rows
    block = load.buffers.piece_beside if load.buffers else z.rows
    room = (z.q + z.lse) * block // (z.rows * rings)
    if not load.keys_received:
        return angles + room
    queries = max(0, z.rows - of_one.keys_received)
    out, lse = (whole * queries // (z.rows * rings) for whole in (z.q, z.lse))
    return angles + max(room, out + 3 * lse + (z.wide(out) if z.half_type else 0))


def _of_documents(z: LayerSizes, heads: int, load: Load, tokens: int) -> tuple[int, int]:
    """Forward and backward, of a rank that has `tokens` of its heads: room for all documents.

    Beside it are the results of the one that is computed. So it is of one over several groups,
    whose keys come in parts: gradients are then sums, in the accumulation dtype.
    """
    block = min(load.buffers.longest, tokens) if load.buffers else tokens
    beside_padding = load.buffers is not None and block > 0
    if load.groups > 1:
        block = block or tokens
    elif load.documents == 1 and not beside_padding and block in (0, tokens):
        return 0, 0
    forward, backward = (z.q + z.lse) * block // tokens, (heads + z.lse) * block // tokens
    if load.groups > 1:
        narrowed = heads if z.half_type else 0
        backward = z.wide(heads) - heads + max(backward, narrowed)
    return forward, backward


def _of_one_rank(z: LayerSizes, load: Load) -> tuple[int, int]:
    """Of a ring of one rank, to which a document alone is one call: room for all documents.

    Over groups keys come in parts, whose results are summed as in a ring of several ranks, and so
    are gradients of queries.
    """
    if load.groups == 1:
        room, _ = _of_documents(z, z.q + z.kv_sent, load, z.s)
        return room, 0
    merged = 2 * z.lse + max(z.lse, z.wide(z.q) if z.half_type else 0)
    return z.wide(z.q) + merged, z.wide(z.q) - z.q


def _more(load: Load, of_one: Load, most: int) -> int:
    """Keys that come at once, if so many at most, beyond those of one document."""
    return max(0, min(load.keys_received, most) - min(of_one.keys_received, most))


def _more_of_tiles(z: LayerSizes, base: str, like: str, of_one: Load, window: float) -> float:
    """Scores of the largest tile, of all heads of a call, beyond those of one document."""
    heads = z.n // z.p if base == "metp" else z.n
    of_row = heads * _of_tile(z.rows, window)
    if like in SPLIT_HEADS:
        return max(of_row - z.n // z.p * _of_tile(z.s, window), 0)
    halves = of_one.keys_received == z.s - z.s // z.p  # not within a narrow window
    return of_row - heads * _of_tile(z.rows // 2 if halves else z.rows, window)


def _of_tile(num_rows: int, window: float) -> float:
    """Scores of the largest tile of a document of so many rows, of one head."""
    return min(num_rows, TILE) * min(num_rows, window + TILE - 1)


def _with_columns(
    strategy: str,
    one: OperationCosts,
    sizes: LayerSizes,
    load: Load,
    more_columns: int,
    least: OperationCosts | None,
    *,
    drops: bool,
) -> tuple[float, float, float]:
    """With so many more columns of score rows than one document's, or fewer.

    Scores are of the accumulation dtype, probabilities of the elements'; both are there when the
    first become the second, and in the backward with the gradients of scores. Products of one
    rank's columns do not shrink: a forward that peaks with these, where no probabilities are there
    yet, falls by the scores alone. With dropout it may peak with the hashes of one rank's columns,
    beside the probabilities when the scores are gone, and then falls by the first alone. What is
    there without any scores stays.
    """
    scores = load.seq_length / load.p * sizes.n * more_columns
    probabilities = sizes.element_bytes * scores
    of_kept = 0.0 if recomputes(strategy) else probabilities
    of_forward = sizes.wide_bytes * scores
    if sizes.half_type and more_columns > 0:
        of_forward += probabilities
    elif drops:
        of_forward = probabilities
    kept = one.kept_bytes + of_kept
    forward = one.forward_bytes + of_forward - of_kept
    of_backward = sizes.wide_bytes * scores
    if more_columns > 0 or not recomputes(strategy):  # whose backward runs the forward again
        of_backward += probabilities
    backward = one.backward_bytes + of_backward - of_kept
    if more_columns > 0:
        return kept, forward, backward
    if least is None:
        return kept, one.forward_bytes, one.backward_bytes
    forward = max(forward, least.kept_bytes + least.forward_bytes - kept, 0.0)
    backward = max(backward, least.kept_bytes + least.backward_bytes - kept, 0.0)
    return kept, forward, backward
