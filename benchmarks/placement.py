"""Placement of packed rows, simulated: how even the ranks' attention is, and what they exchange.

Global batches of 1,024 documents drawn from both published distributions are packed under token
budgets and placed on p ranks, with a causal mask, without a sliding window and with some: then
scores and keys are those that it leaves. Bytes are of keys and values of one layer's forward, 8
heads of 128 in bfloat16, against a plain ring over contiguous chunks, in which every rank gets all
keys.

    .venv/bin/python benchmarks/placement.py --json
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, options
from megatron_paradyse.data.distributions import DISTRIBUTIONS, draw_lengths
from megatron_paradyse.packing.pack import Grid, flops_costs, pack
from megatron_paradyse.packing.placement import place
from megatron_paradyse.packing.row import Row
from megatron_paradyse.packing.work import imbalance, keys_received

DOCUMENTS = 1024
RANKS = (2, 4, 8, 16, 32, 64)
BUDGETS = (64 << 10, 256 << 10, 1 << 20)
WINDOWS = (512, 4096, 16384)
HIDDEN_SIZE = 4096  # by which rows are compared
BYTES_PER_TOKEN = 2 * 8 * 128 * 2  # keys and values


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    ranks, budgets = (RANKS[1:3], BUDGETS[:1]) if arguments.quick else (RANKS, BUDGETS)
    rows = [
        measure(distribution, p, budget, window)
        for window in (None, *(WINDOWS[1:2] if arguments.quick else WINDOWS))
        for distribution in DISTRIBUTIONS
        for p in ranks
        for budget in budgets
    ]
    for row in rows:
        print(row, file=sys.stderr)
    windowed = [row for row in rows if row["window"] is not None]
    rows = [row for row in rows if row["window"] is None]
    result = {
        "imbalance_max": max(row["imbalance_max"] for row in rows),
        "windowed_imbalance_max": max(row["imbalance_max"] for row in windowed),
        "bytes_ratio_max": max(row["bytes_ratio_to_ring"] for row in rows),
        "padding_max": max(row["padding"] for row in rows),
        "solve_cpu_seconds_max": max(row["solve_cpu_seconds"] for row in rows),
        "rows": rows,
        "windowed_rows": windowed,
    }
    finish("placement", result, {"documents": DOCUMENTS, "hidden_size": HIDDEN_SIZE}, arguments)


def measure(distribution: str, p: int, budget: int, window: int | None) -> dict:
    """One global batch on p ranks, in microbatches of at most budget tokens.

    window: keys that a query of any layer sees; None: all before it.
    """
    lengths = draw_lengths(distribution, DOCUMENTS, 1.0, 0).tolist()
    grid = Grid(p=p, hidden_size=HIDDEN_SIZE, alignment=2 * p, window=window)
    start = time.process_time()
    packing = pack(lengths, budget, grid, flops_costs(grid))
    seconds = time.process_time() - start
    alone = functools.partial(place, p=p, causal=True, alignment=2 * p, window=window)
    placed = [made.row or alone([lengths[made.documents[0]]]) for made in packing.replicas[0]]
    uneven = [imbalance(row, causal=True, window=window) for row in placed]
    exchanged = sum(sum(keys_received(row, causal=True, window=window)) for row in placed)
    ring = sum((p - 1) * row.seq_length for row in placed)
    return {
        "distribution": distribution,
        "p": p,
        "window": window,
        "budget_tokens": budget,
        "microbatches": len(placed),
        "imbalance_max": max(uneven),
        "imbalance_median": statistics.median(uneven),
        "documents_across_ranks": sum(map(across, placed)) / DOCUMENTS,
        "padding": sum(row.seq_length for row in placed) / sum(lengths) - 1,
        "exchanged_bytes": exchanged * BYTES_PER_TOKEN,
        "ring_bytes": ring * BYTES_PER_TOKEN,
        "bytes_ratio_to_ring": exchanged / ring,
        "solve_cpu_seconds": seconds,
    }


def across(row: Row) -> int:
    """Documents that more than one rank holds."""
    holders: dict[int, set[int]] = {}
    for rank, pieces in enumerate(row.pieces):
        for number, _, _ in pieces:
            holders.setdefault(number, set()).add(rank)
    return sum(len(ranks) > 1 for ranks in holders.values())


if __name__ == "__main__":
    main()
