"""A packed row as strategies see it."""

from __future__ import annotations

from megatron_paradyse.packing.row import Row
from megatron_paradyse.strategies.contract import Microbatch


def microbatch_of(row: Row) -> Microbatch:
    """The row for strategies: documents, shards and sizes, without angles or a seed."""
    return Microbatch(row.seq_length, 1, (row.documents,), row.shards)
