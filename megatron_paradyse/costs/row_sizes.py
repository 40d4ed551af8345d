"""Sizes of attention on a packed row, and what a flash kernel holds of all its documents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_paradyse.costs.description import (
    CAUSAL,
    ELEMENT_BYTES,
    LATENT_ROTATED,
    Description,
)
from megatron_paradyse.costs.packed import WHOLE_COLUMNS, Packed
from megatron_paradyse.packing.load import Load
from megatron_paradyse.packing.row import aligned
from megatron_paradyse.strategies.accounting import SPLIT_HEADS
from megatron_paradyse.strategies.contract import LatentSizes
from megatron_paradyse.strategies.sizes import DOCUMENT_ROWS, LayerSizes, accumulated_head_dim

WIDEST = 8  # of a dtype that is none of these
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
        head_norm=d.head_norm,
        fused_norms=d.hardware.kind == "cuda",
        **_of_latents(d),
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
    )


def _of_latents(d: Description) -> dict[str, Any]:
    of = d.latents
    if of is None:
        return {}
    sizes = LatentSizes(
        keys=of["kv_lora_rank"],
        content=of["qk_head_dim"],
        positions=of[LATENT_ROTATED],
        value=of["v_head_dim"],
    )
    return {"latent": sizes, "query_latents": of["q_lora_rank"] or d.model.hidden_size}


def of_length(sizes: LayerSizes, load: Load) -> LayerSizes:
    """Of one document of the row's tokens, which p ranks share evenly."""
    return replace(sizes, s=aligned(load.seq_length, sizes.p))


def with_kernel_bytes(z: LayerSizes, base: str, load: Load) -> LayerSizes:
    """With what the backward of a flash kernel holds, of the largest calls of a rank: see sizes.py.

    With several query heads to a key's, each has gradients of keys and values of its own.
    """
    if base in WHOLE_COLUMNS:
        return z
    heads, key_heads = _heads(base, z)
    expanded = 2 * heads * z.d * z.element_bytes if key_heads < heads else 0
    tokens, rows = _largest_call(base, z, load)
    own, crossing = _summed_bytes(z, heads, rows) + expanded * tokens, 0
    if load.buffers is not None:
        keys = min(load.keys_received, load.buffers.keys_sent)
        crossing = _summed_bytes(z, heads, load.buffers.crossing_rows) + expanded * keys
    return replace(z, kernel_bytes=own, crossing_kernel_bytes=crossing)


def row_sum_bytes(base: str, z: LayerSizes) -> int:
    """What the backward of fused_tiles.py holds, of all rows of a rank."""
    if base in WHOLE_COLUMNS:
        return 0
    heads, _ = _heads(base, z)
    return (z.s if base in SPLIT_HEADS else z.rows) * heads * z.wide_bytes


def bytes_of_documents(base: str, z: LayerSizes, load: Load, *, windowed: bool = False) -> int:
    """Of that, what there is besides the rows of a rank, as one document has them.

    windowed: load is what a window leaves, within which pieces of one document join too, if they do
    not see each other.
    """
    if base in WHOLE_COLUMNS:
        return 0
    tokens = z.s if base in SPLIT_HEADS else z.rows
    _, rows = _largest_call(base, z, load, windowed=windowed)
    if base not in SPLIT_HEADS and load.buffers is not None:
        rows = max(rows, load.buffers.crossing_rows)
    heads, _ = _heads(base, z)
    return _summed_bytes(z, heads, max(rows - tokens - -tokens % DOCUMENT_ROWS, 0))


def _largest_call(
    base: str, z: LayerSizes, load: Load, *, windowed: bool = False
) -> tuple[int, int]:
    """Its tokens, and rows that its backward sums: of all of a rank's, unless a window leaves less.

    One document alone is no row, unless that is wide.
    """
    row, splits = load.buffers, base in SPLIT_HEADS
    if row is not None and row.call and not (splits and load.groups > 1):
        if splits:
            return row.call, row.call_rows
        return row.call_here, row.call_here_rows
    tokens, pieces = z.s if splits else z.rows, 1
    if load.documents > 1 or (windowed and load.groups > 1):
        if splits:
            pieces = load.documents * (2 if load.groups > 1 else 1)
        elif row is not None and row.pieces:
            pieces = row.pieces
        else:
            pieces = load.fullest_documents * (2 if load.crosses else 1)
    return tokens, tokens + (pieces * DOCUMENT_ROWS if pieces > 1 else -tokens % DOCUMENT_ROWS)


def _heads(base: str, z: LayerSizes) -> tuple[int, int]:
    """Of queries, and of keys, in one call."""
    if base in SPLIT_HEADS or base == "metp":
        return z.n // z.p, z.kv_heads_sent // z.p
    return z.n, z.g


def _summed_bytes(z: LayerSizes, heads: int, rows: int) -> int:
    """The gradient of q, and of each row the sum of out times its gradient."""
    return rows * heads * (accumulated_head_dim(z.d) + 1) * z.wide_bytes
