"""What benchmarks/packed_workload.py prints of its times: ratios to packed ParaDySe."""

from __future__ import annotations

import statistics
from typing import Any

UNPACKED, PACKED = "unpacked", "packed"


def ratios(seconds: dict[str, list[list[float]]], peaks: dict[str, float | None]) -> dict[str, Any]:
    """seconds: name -> global batch -> of each round, of those that fit; peaks: bytes of all.

    A total is the sum of the global batches' medians. best_fixed: the fixed strategy with the
    least; a fixed strategy without seconds ran out of memory, without a peak it cannot run.
    """
    totals = {
        name: sum(statistics.median(times) for times in batches)
        for name, batches in seconds.items()
    }
    fixed: dict[str, float | str] = {
        name: "cannot run" if peak is None else totals.get(name, "oom")
        for name, peak in peaks.items()
        if name not in (PACKED, UNPACKED)
    }
    running = {name: total for name, total in fixed.items() if not isinstance(total, str)}
    best = min(running, key=lambda name: running[name]) if running else None
    return {
        "tokens_per_second_ratio_to_unpacked": _ratio(totals, UNPACKED),
        "ratio_to_best_fixed_packed": _ratio(totals, best),
        "best_fixed": best,
        "packed_seconds": totals.get(PACKED),
        "unpacked_seconds": totals.get(UNPACKED),
        "fixed": fixed,
        "seconds": seconds,
        "peak_bytes": peaks,
        "noise": _noise(seconds),
    }


def _ratio(totals: dict[str, float], name: str | None) -> float | None:
    """Of a total to the packed ParaDySe's."""
    return totals[name] / totals[PACKED] if name in totals and PACKED in totals else None


def _noise(seconds: dict[str, list[list[float]]]) -> float:
    """Median over policies and global batches of the spread of the rounds."""
    spreads = [
        (max(times) - min(times)) / statistics.median(times)
        for batches in seconds.values()
        for times in batches
    ]
    return statistics.median(spreads)
