"""Memory of attention on a packed row: never less than it takes, kept bytes exactly.

Peaks are those of one document, as measured, and what the walks of strategies/walks/ hold more or
less of the row than of it. Where they do not tell, see row_bounds.py.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_paradyse.costs.packed import WHOLE_COLUMNS
from megatron_paradyse.costs.row_sizes import of_length, row_sum_bytes, with_kernel_bytes
from megatron_paradyse.costs.table import ATTENTION, OperationCosts
from megatron_paradyse.packing.load import Load, load_in_chunks
from megatron_paradyse.plan import MEGATRON_TS
from megatron_paradyse.strategies import base_name, recomputes
from megatron_paradyse.strategies.accounting import (
    RANKS_DIFFER,
    SPLIT_HEADS,
    attention_bytes,
    down_projection_bytes,
    projection_bytes,
)
from megatron_paradyse.strategies.row_sizes import RowSizes
from megatron_paradyse.strategies.sizes import LayerSizes, is_narrow
from megatron_paradyse.strategies.walks.rings import swaps

OF_NORM = 2  # activations
TRUSTED = 0.02  # of what is measured of one document, by which a walk of it may be off

Peaks = tuple[float, float, float]  # kept bytes, and with them the peaks of forward and backward


def walked_row_bytes(
    strategy: str,
    like: str,
    one: OperationCosts,
    sizes: LayerSizes,
    load: Load,
    *,
    in_one_call: bool = False,
    window: int | None = None,
) -> OperationCosts | None:
    """The bytes on a row: those of one document of `like`, and what the walks differ by.

    in_one_call: a flash kernel takes all documents that lie side by side; its backward holds more
    then than that of one document, and is walked with it. window: keys that a query sees, and the
    load is what it leaves; None: all. None where the walks do not tell: of
    Megatron's own modules, of rows whose buffers are not known, of split heads over groups, and
    where one document was not measured as it is walked.
    """
    base = base_name(strategy)
    if load.buffers is None or base == MEGATRON_TS or (load.groups > 1 and base in SPLIT_HEADS):
        return None
    if window is None and (not in_one_call or base in WHOLE_COLUMNS):  # documents are each a call
        load = replace(load, buffers=replace(load.buffers, call=0, crossing=0))
    alone = of_length(sizes, load)
    of_row = _of_row(alone, load)
    if window is not None:
        sums = row_sum_bytes(base, alone)
        of_row = replace(of_row, kernel_bytes=sums, crossing_kernel_bytes=sums)
    measured = _peaks(one.kept_bytes, one.forward_bytes, one.backward_bytes)
    walked_one = _walked_one(like, _of_document(like, alone, window, in_one_call=in_one_call))
    if window is not None:  # which leaves less of blocks than walks say
        measured = _most(measured, walked_one)
    if in_one_call and not _holds(measured, walked_one):  # it may not have been that kernel
        walked_one = _walked_one(like, _of_document(like, alone, window, in_one_call=False))
    elif in_one_call:
        of_row = with_kernel_bytes(of_row, base, load)
    if not _holds(measured, walked_one):
        return None
    walked_row = _peaks(*attention_bytes(strategy, of_row))
    kept = measured[0] + walked_row[0] - walked_one[0]
    norm = OF_NORM * alone.x
    if alone.latent is not None:  # the activation that they are made of, and their own norms
        norm += alone.x + OF_NORM * alone.input
    # A forward ends with the attention's output, beside the layer's that is made of it.
    least = kept + min(one.forward_bytes, alone.x), kept
    forward, backward = (
        max(least[i - 1], _peak_of_row(measured[i], walked_one[i], walked_row[i], norm=norm))
        for i in (1, 2)
    )
    # While proj's gradients are made more may be there that no walk knows than beside attention.
    of_projections = kept + projection_bytes(strategy, of_row, norm=norm)
    backward = max(backward, of_projections, down_projection_bytes(alone))
    if in_one_call and load.documents > 1:
        _, _, with_kernel = attention_bytes(strategy, with_kernel_bytes(of_row, base, load))
        made_anew = norm if recomputes(strategy) else 0  # what else is kept
        backward = max(backward, kept + with_kernel + made_anew)
    return replace(
        one, kept_bytes=kept, forward_bytes=forward - kept, backward_bytes=backward - kept
    )


def _of_row(alone: LayerSizes, load: Load) -> LayerSizes:
    """alone: of one document of the row's tokens."""
    return replace(
        alone,
        row=load.buffers,
        keys_received=load.keys_received,
        peers=load.peers,
        in_order=load.in_order and load.groups == 1,
    )


def _of_document(
    like: str, alone: LayerSizes, window: int | None, *, in_one_call: bool
) -> LayerSizes:
    """Of that document as the strategy runs it: rings within a narrow window as they run rows."""
    base = base_name(like)
    if window is None or base in SPLIT_HEADS or not is_narrow(window, alone.s, alone.p):
        return replace(alone, flash=in_one_call)
    load = load_in_chunks(alone.s, alone.p, window)
    of_row = _of_row(alone, load)
    return with_kernel_bytes(of_row, base, load) if in_one_call else of_row


def _walked_one(like: str, z: LayerSizes) -> Peaks:
    kept, forward, backward = _peaks(*attention_bytes(like, z))
    return kept, forward, backward - (_let_go(like, z) if recomputes(like) else 0)


def _most(measured: Peaks, walked: Peaks) -> Peaks:
    kept, forward, backward = map(max, measured, walked)
    return kept, forward, backward


def _holds(measured: Peaks, walked: Peaks) -> bool:
    """Whether what was measured of one document is as it is walked, or more."""
    pairs = zip(measured, walked, strict=True)
    return all(found >= (1 - TRUSTED) * told for found, told in pairs)


def _let_go(like: str, z: LayerSizes) -> int:
    """Of the walk of a second run: in a layer the norm is run again too, and what it gave is gone
    once its halves are swapped."""
    return z.input if (base_name(like), ATTENTION) in RANKS_DIFFER and swaps(0, z) else 0


def _peaks(kept: float, forward: float, backward: float) -> Peaks:
    """Of workspaces above what is kept."""
    return kept, kept + forward, kept + backward


def _peak_of_row(measured: float, walked_one: float, walked_row: float, *, norm: float) -> float:
    """What was measured of one document, and what the walks of a row and of it differ by.

    Beside what walks know are the layer's norm and what kernels hold. What is more than the norm
    may be another peak, which does not get lower with theirs.
    """
    more = walked_row - walked_one
    another = measured - walked_one > TRUSTED * walked_one + norm
    return measured + (max(more, 0) if another else more)


def joined(strategy: str, load: Load, *, windowed: bool = False) -> Load:
    """Of a kernel that takes documents that lie side by side at once.

    But for those that are longer than a window, each a call of its own.
    """
    if load.buffers is None or base_name(strategy) in WHOLE_COLUMNS:
        return load
    within = load.within
    if within is not None and within.buffers is not None:
        within = replace(within, buffers=_in_calls(within.buffers, within, windowed=True))
    return replace(load, buffers=_in_calls(load.buffers, load, windowed=windowed), within=within)


def _in_calls(row: RowSizes, load: Load, *, windowed: bool) -> RowSizes:
    """Where calls are not known, they are of all of a rank: without padding, as one document is.

    Without a window pieces of a document on a rank are one block, and all of a rank one call, of
    which nothing is merged before keys come.
    """
    s, rows = load.seq_length, -(-load.seq_length // load.p)
    if row.call:
        return replace(
            row,
            longest=row.call if row.call < s else 0,
            piece=row.call_here,
            piece_beside=row.call_beside,
            held=row.call_here if windowed and row.held else 0,
        )
    beside = row.padded or windowed
    return replace(
        row,
        longest=s if row.longest and beside else 0,
        piece=rows,
        piece_beside=rows if row.piece_beside and beside else 0,
        held=rows,
    )
