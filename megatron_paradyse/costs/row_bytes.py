"""Memory of attention on a packed row: never less than it takes, kept bytes exactly.

Peaks are those of one document, as measured, and what the walks of strategies/walks/ hold more or
less of the row than of it. Where they do not tell, workspace is that of one document and upper
bounds of what rows may need besides: copies that bring them into order, gradients of several
documents summed in the accumulation dtype, keys that are sent while others come, and more of these
than come to one document within a narrow window; and where a window or dropout takes the tiled
kernel, its tiles of documents that are longer than the halves of chunks in a ring. What is kept is
then that of one document, but for ColossalZ's score rows, which have a column for each key that
comes, and for what MegatronTS keeps of rows that are not in the order of positions.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_paradyse.costs.description import CAUSAL, ELEMENT_BYTES, Description
from megatron_paradyse.costs.packed import LOCAL, WHOLE_COLUMNS, Packed
from megatron_paradyse.costs.table import ATTENTION, OperationCosts
from megatron_paradyse.packing.load import Load
from megatron_paradyse.strategies import base_name, recomputes
from megatron_paradyse.strategies.accounting import RANKS_DIFFER, SPLIT_HEADS, attention_bytes
from megatron_paradyse.strategies.sizes import DOCUMENT_ROWS, LayerSizes, accumulated_head_dim
from megatron_paradyse.strategies.walks.rings import swaps
from megatron_paradyse.strategies.walks.rows import index_bytes

WIDEST = 8  # of a dtype that is none of these
MEGATRON = "megatron_ts"  # whose modules are Megatron's, of which no walk knows every buffer
OF_NORM = 2  # activations
TRUSTED = 0.02  # of what is measured of one document, by which a walk of it may be off
TILE = 64  # queries at a time, in strategies/tiled_kernel.py
FORWARD_TILES, BACKWARD_TILES = 3, 5  # of scores and what is made of them, that it holds at once
FLASH_HEAD_DIMS = range(8, 257, 8)  # for which flash kernels, which know windows, take half types


def layer_sizes(d: Description) -> LayerSizes:
    """Of a row of p tokens; whoever asks of another replaces s."""
    m = d.model
    return LayerSizes(
        s=d.p,
        b=1,
        h=m.hidden_size,
        n=m.num_heads,
        g=m.num_kv_heads,
        d=m.head_dim,
        f=m.ffn_size,
        p=d.p,
        element_bytes=ELEMENT_BYTES.get(d.dtype, WIDEST),
        causal=d.attention_mask == CAUSAL,
        gate=d.output_gate,
        rope_channels=d.rotated_channels,
        narrow_values=d.latents is not None and d.latents["v_head_dim"] < m.head_dim,
    )


def packed_of(d: Description) -> Packed:
    """Without fits."""
    sizes = layer_sizes(d)
    flash = d.hardware.kind == "cuda" and sizes.half_type and sizes.d in FLASH_HEAD_DIMS
    dropout = bool(d.attention_dropout)
    return Packed(
        sizes.causal,
        sizes,
        windows=d.windows,
        in_tiles=d.tiled_scores is not False and (dropout or not flash),
        dropout=dropout,
        joined=flash and not dropout,
        walked=d.latents is None,
    )


def walked_row_bytes(
    strategy: str,
    like: str,
    one: OperationCosts,
    sizes: LayerSizes,
    load: Load,
    *,
    in_one_call: bool = False,
) -> OperationCosts | None:
    """The bytes on a row: those of one document of `like`, and what the walks differ by.

    in_one_call: a flash kernel takes all documents that lie side by side; its backward holds more
    then than that of one document, and is walked with it. None where the walks do not tell: of
    Megatron's own modules, of rows whose buffers are not known, of split heads over groups, and
    where one document was not measured as it is walked.
    """
    base = base_name(strategy)
    if load.buffers is None or base == MEGATRON or (load.groups > 1 and base in SPLIT_HEADS):
        return None
    alone = _of_length(sizes, load)
    of_row = replace(
        alone,
        row=load.buffers,
        keys_received=load.keys_received,
        peers=load.peers,
        in_order=load.in_order,
    )
    measured = _peaks(one.kept_bytes, one.forward_bytes, one.backward_bytes)
    walked_one = _walked_one(like, replace(alone, flash=in_one_call))
    if in_one_call and not _holds(measured, walked_one):  # it may not have been that kernel
        walked_one = _walked_one(like, alone)
    elif in_one_call:
        of_row = replace(of_row, kernel_bytes=_kernel_bytes(base, alone, load))
    if not _holds(measured, walked_one):
        return None
    walked_row = _peaks(*attention_bytes(strategy, of_row))
    kept = measured[0] + walked_row[0] - walked_one[0]
    norm = OF_NORM * alone.x
    # A forward ends with the attention's output, beside the layer's that is made of it.
    least = kept + min(one.forward_bytes, alone.x), kept
    forward, backward = (
        max(least[i - 1], _peak_of_row(measured[i], walked_one[i], walked_row[i], norm=norm))
        for i in (1, 2)
    )
    if in_one_call and load.documents > 1:
        of_kernel = replace(of_row, kernel_bytes=_kernel_bytes(base, alone, load))
        _, _, with_kernel = attention_bytes(strategy, of_kernel)
        made_anew = norm if recomputes(strategy) else 0  # what else is kept
        backward = max(backward, kept + with_kernel + made_anew)
    return replace(
        one, kept_bytes=kept, forward_bytes=forward - kept, backward_bytes=backward - kept
    )


def _walked_one(like: str, z: LayerSizes) -> tuple[float, float, float]:
    kept, forward, backward = _peaks(*attention_bytes(like, z))
    return kept, forward, backward - (_let_go(like, z) if recomputes(like) else 0)


def _holds(measured: tuple[float, ...], walked: tuple[float, ...]) -> bool:
    """Whether what was measured of one document is as it is walked, or more."""
    pairs = zip(measured, walked, strict=True)
    return all(found >= (1 - TRUSTED) * told for found, told in pairs)


def _let_go(like: str, z: LayerSizes) -> int:
    """Of the walk of a second run: in a layer the norm is run again too, and what it gave is gone
    once its halves are swapped."""
    return z.x if (base_name(like), ATTENTION) in RANKS_DIFFER and swaps(0, z) else 0


def _of_length(sizes: LayerSizes, load: Load) -> LayerSizes:
    """Of one document of the row's tokens, which p ranks share evenly."""
    return replace(sizes, s=-(-load.seq_length // sizes.p) * sizes.p)


def _peaks(kept: float, forward: float, backward: float) -> tuple[float, float, float]:
    """Kept bytes, and with them the peaks of forward and backward."""
    return kept, kept + forward, kept + backward


def _peak_of_row(measured: float, walked_one: float, walked_row: float, *, norm: float) -> float:
    """What was measured of one document, and what the walks of a row and of it differ by.

    Beside what walks know are the layer's norm and what kernels hold. What is more than the norm
    may be another peak, which does not get lower with theirs.
    """
    more = walked_row - walked_one
    another = measured - walked_one > TRUSTED * walked_one + norm
    return measured + (max(more, 0) if another else more)


def _kernel_bytes(base: str, z: LayerSizes, load: Load) -> int:
    """What the backward of a flash kernel holds, of all documents of a rank: see sizes.py.

    With several query heads to a key's, each has gradients of keys and values of its own.
    """
    if base in WHOLE_COLUMNS:
        return 0
    heads, key_heads = _heads(base, z)
    rows = z.s if base in SPLIT_HEADS else z.rows
    expanded = 2 * rows * heads * z.d * z.element_bytes if key_heads < heads else 0
    of_documents = _bytes_of_documents(base, z, load)
    rows += 0 if of_documents else -rows % DOCUMENT_ROWS
    return _summed_bytes(z, heads, rows) + expanded + of_documents


def _bytes_of_documents(base: str, z: LayerSizes, load: Load) -> int:
    """Of that, what there is of each document besides its rows, in one call of several."""
    if base in WHOLE_COLUMNS or load.documents == 1:
        return 0
    if base in SPLIT_HEADS:
        pieces = load.documents * (2 if load.groups > 1 else 1)
    elif load.buffers and load.buffers.pieces:
        pieces = load.buffers.pieces
    else:
        pieces = load.fullest_documents * (2 if load.crosses else 1)
    heads, _ = _heads(base, z)
    return _summed_bytes(z, heads, pieces * DOCUMENT_ROWS) if pieces > 1 else 0


def _heads(base: str, z: LayerSizes) -> tuple[int, int]:
    """Of queries, and of keys, in one call."""
    if base in SPLIT_HEADS or base == "metp":
        return z.n // z.p, z.kv_heads_sent // z.p
    return z.n, z.g


def _summed_bytes(z: LayerSizes, heads: int, rows: int) -> int:
    """The gradient of q, and of each row the sum of out times its gradient."""
    return rows * heads * (accumulated_head_dim(z.d) + 1) * z.wide_bytes


def joined(strategy: str, load: Load) -> Load:
    """Of a kernel that takes documents that lie side by side at once: all of a rank, at most."""
    row = load.buffers
    if row is None or base_name(strategy) in WHOLE_COLUMNS:
        return load
    rows = -(-load.seq_length // load.p)
    largest = replace(
        row,
        longest=load.seq_length if row.longest else 0,
        piece=rows,
        piece_beside=rows if row.piece_beside else 0,
        held=rows,
    )
    return replace(load, buffers=largest)


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
    drops: bool = False,
) -> OperationCosts:
    """The bytes on a row, from those of one document.

    in_one_call: a flash kernel takes all documents that lie side by side. drops: there is dropout
    of attention. of_one: the load of that document. least: of a strategy that gathers the same
    weights and has no score rows; None: not known. tiled_window: keys that a query sees, where the
    tiled kernel runs.
    """
    kept, forward, backward = one.kept_bytes, one.forward_bytes, one.backward_bytes
    if base_name(strategy) in WHOLE_COLUMNS:
        more_columns = load.keys_received - of_one.keys_received
        kept, forward, backward = _with_columns(
            strategy, one, sizes, load, more_columns, least, drops=drops
        )
    more_kept, more_forward, more_backward = extra_bytes(
        strategy, sizes, load, of_one, tiled_window
    )
    if in_one_call:
        more_backward += _bytes_of_documents(base_name(strategy), sizes, load)
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
) -> tuple[int, int, int]:
    """What a row keeps, and its forward and backward hold above that, beyond one document."""
    base = base_name(strategy)
    z = replace(_of_length(sizes, load), in_order=load.in_order)
    kept, forward, backward = 0, 0, 0
    if base in SPLIT_HEADS or base == LOCAL:
        heads = z.q + z.kv_sent
        forward, backward = _of_documents(z, heads, load)
        if load.groups > 1:  # keys that are used, that come and that are sent; gradients likewise
            chunks = min(load.groups, 3)
            forward += heads + z.wide(z.q) + chunks * z.kv_sent
            backward += z.q + chunks * (z.kv_sent + z.wide(z.kv_sent))
        if not load.in_order and base != LOCAL:
            own = base == MEGATRON  # which has its heads' gates and outputs in order too
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
    if tiled_window is not None and base not in (*SPLIT_HEADS, *WHOLE_COLUMNS):
        heads = z.n // z.p if base == "metp" else z.n
        halves = of_one.keys_received == z.s - z.s // z.p  # not within a narrow window
        rows = z.rows // 2 if halves else z.rows
        scores = _of_tile(z.rows, tiled_window) - _of_tile(rows, tiled_window)
        tiles = int(heads * scores * z.wide_bytes)
        forward, backward = forward + FORWARD_TILES * tiles, backward + BACKWARD_TILES * tiles
    if not recomputes(strategy):
        return kept, forward, backward
    return 0, kept + forward, kept + max(forward, backward)


def _beyond_narrow(z: LayerSizes, load: Load, of_one: Load, rings: int) -> int:
    """Of a forward, beside one document within a narrow window, whose ranks hold a chunk each.

    Angles of rows are copied together, in float32. And of that document few queries meet keys that
    come; of a row's pieces as many as a rank holds have results to be merged.
    """
    angles = 4 * z.rope_channels * z.rows
    if not load.keys_received:
        return angles
    queries = max(0, z.rows - of_one.keys_received)
    out, lse = (whole * queries // (z.rows * rings) for whole in (z.q, z.lse))
    return angles + out + 3 * lse + (z.wide(out) if z.half_type else 0)


def _of_documents(z: LayerSizes, heads: int, load: Load) -> tuple[int, int]:
    """Forward and backward, of a rank that has all tokens of its heads: room for all documents.

    Beside it are the results of the one that is computed, and gradients as they are returned.
    """
    block = load.buffers.longest if load.buffers else z.s
    if load.documents == 1 and block in (0, z.s):
        return 0, 0
    narrowed = heads if z.half_type else 0
    of_block = (heads + z.lse) * block // z.s
    return (z.q + z.lse) * block // z.s, z.wide(heads) - heads + max(of_block, narrowed)


def _more(load: Load, of_one: Load, most: int) -> int:
    """Keys that come at once, if so many at most, beyond those of one document."""
    return max(0, min(load.keys_received, most) - min(of_one.keys_received, most))


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
