"""The error of attention merged from p parts by log-sum-exp, against float64, beside its bound.

One process does what the p ranks of a ring do: the queries of each chunk attend to the chunks of
keys as they come round, and each part is merged into what is there. docs/numerics.md derives the
bound; values are divided by the largest |v|. Causal attention of 1,024 positions, 2 heads of 32
channels, over 4 draws; the bound's L is measured.

    .venv/bin/python benchmarks/numerics.py --json
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import finish, options
from megatron_paradyse.strategies.blocks import Span
from megatron_paradyse.strategies.contract import AttentionShape, Microbatch
from megatron_paradyse.strategies.local_attention import AttentionTask, PartialOutput

PARTS = (1, 2, 3, 4, 8, 16, 64)
S, HEADS, D = 1024, 2, 32
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    draws = 1 if arguments.quick else 4
    rows = [row(dtype, p, draws) for dtype in UNIT for p in PARTS]
    for found in rows:
        print(json.dumps(found))
    worst = max(found["error_over_bound"] for found in rows if found["error_over_bound"])
    result = {"error_over_bound_max": worst, "rows": rows}
    finish("numerics", result, {"s": S, "heads": HEADS, "head_dim": D, "draws": draws}, arguments)


def bound(p: int, largest_lse: float) -> float:
    """Of the error of p merged parts over max |v|, in float32: see docs/numerics.md."""
    steps = p - 1
    units = 4 + steps * (largest_lse + 14) + (largest_lse + 2) * steps * max(steps - 1, 0) / 4
    return units * UNIT[torch.float32]


def row(dtype: torch.dtype, p: int, draws: int) -> dict:
    """The largest error over draws; in units of the last place of the dtype too."""
    errors, ratios = [], []
    for seed in range(draws):
        error, largest_lse = merged_error(dtype, p, seed)
        errors.append(error)
        ratios.append(error / bound(p, largest_lse))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "p": p,
        "error_max": max(errors),
        "error_in_units": round(max(errors) / UNIT[dtype], 2),
        # bfloat16 rounds the inputs of every product, which the bound of the merging leaves out
        "error_over_bound": round(max(ratios), 4) if dtype == torch.float32 else None,
    }


def merged_error(dtype: torch.dtype, p: int, seed: int) -> tuple[float, float]:
    """(error over max |v|, largest |lse|) of attention whose keys come in p chunks."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(S, 1, HEADS, D, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(3)
    )
    shape = AttentionShape(HEADS, HEADS, D, causal=True, softmax_scale=D**-0.5)
    task = AttentionTask(shape, Microbatch(S, 1))
    edges = [round(i * S / p) for i in range(p + 1)]
    chunks = [slice(*ends) for ends in itertools.pairwise(edges)]
    outs, lses = [], []
    for rank, own in enumerate(chunks):
        partial = PartialOutput(q[own])
        for step in range(rank + 1):  # those behind a causal query's chunk come by unused
            chunk = chunks[rank - step]
            spans = {
                "q_spans": (Span(0, own.start, own.stop),),
                "k_spans": (Span(0, chunk.start, chunk.stop),),
            }
            partial.add(k[chunk], v[chunk], **spans, task=task)
        out, lse = partial.result()
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs), torch.cat(lses, 2)
    exact = in_float64(q, k, v)
    error = (out.double() - exact).abs().max() / v.double().abs().max()
    return float(error), float(lse.abs().max())


def in_float64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention by its definition: [s, b, n, d]."""
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * D**-0.5
    allowed = torch.ones(S, S, dtype=torch.bool).tril()
    weights = torch.softmax(scores.masked_fill(~allowed, float("-inf")), 3)
    return (weights @ v).permute(2, 0, 1, 3)


if __name__ == "__main__":
    main()
