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
    return replace(sizes, s=-(-load.seq_length // sizes.p) * sizes.p)


def kernel_bytes(base: str, z: LayerSizes, load: Load) -> int:
    """What the backward of a flash kernel holds, of all documents of a rank: see sizes.py.

    With several query heads to a key's, each has gradients of keys and values of its own.
    """
    if base in WHOLE_COLUMNS:
        return 0
    heads, key_heads = _heads(base, z)
    rows = z.s if base in SPLIT_HEADS else z.rows
    expanded = 2 * rows * heads * z.d * z.element_bytes if key_heads < heads else 0
    of_documents = bytes_of_documents(base, z, load)
    rows += 0 if of_documents else -rows % DOCUMENT_ROWS
    return _summed_bytes(z, heads, rows) + expanded + of_documents


def bytes_of_documents(base: str, z: LayerSizes, load: Load, *, windowed: bool = False) -> int:
    """Of that, what there is of each document besides its rows, in one call of several.

    windowed: load is what a window leaves, within which pieces of one document join too, if they do
    not see each other. One alone is no row, unless that is wide.
    """
    joins = load.documents > 1 or (windowed and load.groups > 1)
    if base in WHOLE_COLUMNS or not joins:
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
