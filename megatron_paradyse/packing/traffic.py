"""A packed row as strategies see it, and the bytes that each sends for its attention."""

from __future__ import annotations

from megatron_paradyse.packing.row import Row
from megatron_paradyse.packing.work import keys_moved
from megatron_paradyse.strategies.accounting import packed_attention_sent
from megatron_paradyse.strategies.contract import Microbatch
from megatron_paradyse.strategies.sizes import LayerSizes


def microbatch_of(row: Row) -> Microbatch:
    """The row for strategies: documents, shards and sizes, without angles or a seed."""
    return Microbatch(row.seq_length, 1, (row.documents,), row.shards)


def attention_bytes_sent(strategy: str, row: Row, sizes: LayerSizes) -> list[tuple[int, int]]:
    """Per rank the bytes that it sends in the forward and in the backward, weights included.

    Exact, as counted, but of METP with g % p != 0: there weights count as those of the rank that
    sends most. sizes: of the layer, with s, b = 1 and p of the row; the MLP sends what
    operation_costs says, whatever is packed. +recompute counts its second forward.
    """
    assert (sizes.s, sizes.b, sizes.p) == (row.seq_length, 1, row.p), "sizes of this row"
    moved = keys_moved(row, causal=sizes.causal)
    sent = [sum(line) for line in moved]
    received = [sum(column) for column in zip(*moved, strict=True)]
    return [
        packed_attention_sent(strategy, sizes, keys_sent=s, keys_received=r)
        for s, r in zip(sent, received, strict=True)
    ]
