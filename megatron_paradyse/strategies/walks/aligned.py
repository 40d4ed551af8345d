"""METP's rows of qkv that change ranks, by number: what aligned_heads.py sends and holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from megatron_paradyse.strategies.sizes import LayerSizes, Ledger, qkv_rows
from megatron_paradyse.strategies.walks.steps import INDEX_BYTES


@dataclass(frozen=True)
class AlignedRows:
    """Of one rank: rows of its shard that blocks have, and rows of shards that its block has.

    sent and received count those that stay, sent_away and received_here do not; most_to_one: of
    its shard, to one rank; num_chunks: of columns, in which they go.
    """

    sent: int
    received: int
    sent_away: int
    received_here: int
    most_to_one: int
    num_chunks: int


@lru_cache(maxsize=64)
def aligned_rows(n: int, g: int, d: int, p: int, gate: bool) -> tuple[AlignedRows, ...]:
    """By rank; of shards that are not whole heads."""
    total = qkv_rows(n, g, d, gate=gate)
    slot, size = total // (g * d), total // p
    counts = [[0] * p for _ in range(p)]  # [of the shard of][in the block of]
    for rank in range(p):
        queries = range(rank * n // p, (rank + 1) * n // p)
        groups = {query // (n // g) for query in queries}
        heads = {query // (n // g) * slot + query % (n // g) for query in queries}
        if gate:
            heads |= {head + n // g for head in heads}
        heads |= {(group + 1) * slot - i for group in groups for i in (1, 2)}
        for row in (head * d + i for head in heads for i in range(d)):
            counts[row // size][rank] += 1
    sent = [sum(row) for row in counts]
    received = [sum(column) for column in zip(*counts, strict=True)]
    num_chunks = -(-max(sent) // (qkv_rows(n, lcm(g, p), d, gate=gate) // p))
    return tuple(
        AlignedRows(
            sent=sent[rank],
            received=received[rank],
            sent_away=sent[rank] - counts[rank][rank],
            received_here=received[rank] - counts[rank][rank],
            most_to_one=max(counts[rank]),
            num_chunks=num_chunks,
        )
        for rank in range(p)
    )


def block_rows(z: LayerSizes) -> int:
    """Rows of qkv in a block of whole heads, of which ranks may share key heads."""
    return z.qkv_rows(z.kv_heads_sent) // z.p


def hold_aligned(m: Ledger, z: LayerSizes) -> None:
    """Holds "aligned" and "aligned_bias", the rank's block, if its shard has not whole heads."""
    if z.g % z.p == 0:
        m.hold(aligned=0, aligned_bias=0)
        return
    mine = aligned_rows(z.n, z.g, z.d, z.p, z.gate)[m.rank]
    rows = block_rows(z)
    row = -(-z.h // mine.num_chunks) * z.element_bytes
    m.hold(aligned=rows * z.h * z.element_bytes, indices=INDEX_BYTES * mine.sent)
    m.touch((mine.received + max(mine.sent, rows)) * row)
    m.drop("indices")
    m.hold(aligned_bias=rows * z.element_bytes if z.bias else 0)


def hold_shard_gradient(m: Ledger, z: LayerSizes) -> None:
    """Holds "shard_gradient", made of that of the rank's own block, if that is not the same."""
    if z.g % z.p == 0:
        m.hold(shard_gradient=0)
        return
    mine = aligned_rows(z.n, z.g, z.d, z.p, z.gate)[m.rank]
    row = -(-z.h // mine.num_chunks) * z.wide_bytes
    m.hold(shard_gradient=z.wide(z.qkv_weight) // z.p)
    m.touch((mine.received + mine.sent + mine.most_to_one) * row)
