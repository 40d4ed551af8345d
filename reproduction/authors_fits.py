"""BERT on the same documents by the authors' own fits of seconds, which no part of ours has seen.

benchmarks/data/a100_time_fits.csv: seconds = a s^2 + b s + c of all 24 layers, 8 x A100-SXM4-80GB,
from the public reference code. What ParaDySe would save if these were the seconds and every
document ran the fastest: nothing of it is simulated by us.
"""

from __future__ import annotations

import csv

import numpy as np

from reproduction.documents import document_lengths
from reproduction.options import ROOT

COLUMNS = ("model", "distribution", "policy", "seconds", "best_seconds", "reduction")
FITS = ROOT / "benchmarks" / "data" / "a100_time_fits.csv"
BERT_LAYERS, BERT_HIDDEN = "24", "1024"
SOURCE = "the authors' fits of measured seconds; 8 x A100-SXM4-80GB, fp16; read 2026-11-21"


def fits_rows(distributions) -> list[dict]:
    """Per strategy: cumulative seconds, and what the fastest for each document would save."""
    with FITS.open(encoding="utf-8") as stream:
        lines = csv.DictReader(line for line in stream if not line.startswith("#"))
        fits = {
            row["strategy"]: [float(row[name]) for name in "abc"]
            for row in lines
            if (row["num_layers"], row["hidden_size"]) == (BERT_LAYERS, BERT_HIDDEN)
        }
    rows = []
    for distribution in distributions:
        s = document_lengths(distribution).astype(float)
        seconds = {name: a * s**2 + b * s + c for name, (a, b, c) in fits.items()}
        best = float(np.min(list(seconds.values()), axis=0).sum())
        for name, each in seconds.items():
            total = float(each.sum())
            rows.append(
                {
                    "model": "bert",
                    "distribution": distribution,
                    "policy": name,
                    "seconds": total,
                    "best_seconds": best,
                    "reduction": 1 - best / total,
                }
            )
    return rows
