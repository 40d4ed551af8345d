"""Packed rows of the tests, what ranks hold of them as it is counted, and costs by the formulas.

The strategies run on the fake process group, which holds nothing.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.table import (
    ATTENTION,
    Constants,
    CostTable,
    Measurement,
)
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.strategies import (
    strategy_names,
)
from megatron_paradyse.strategies.accounting import operation_costs
from megatron_paradyse.strategies.contract import Wide
from megatron_paradyse.strategies.sizes import LayerSizes
from tests.costs.synthetic import DESCRIPTION
from tests.packing.rows import zigzag
from tests.strategies.cases import AttentionCase
from tests.strategies.fake_ranks import measure_rank, on_fake_ranks

S, N, D = 128, 8, 16
LENGTHS = (64, 96, 128, 192, 512)
BYTES = ("kept_bytes", "forward_bytes", "backward_bytes")
# Fits of the formulas, and the formulas themselves, are this far off at most.
TOLERANCE = 0.02
VARIANTS = {
    "activations": {"g": 8, "h": 16, "dtype": torch.float32},
    "weights": {"g": 8, "h": 128, "dtype": torch.bfloat16},
    "shared keys": {"g": 2, "h": 16, "dtype": torch.bfloat16},
    "gated": {"g": 2, "h": 16, "dtype": torch.float32, "gate": True},
}
NORMED = {
    f"{norm}, {dtype}": {"g": 2, "h": 16, "dtype": dtype, "qk_norm": norm}
    for norm in ("rmsnorm", "layernorm")
    for dtype in (torch.float32, torch.bfloat16)
}
NAMES = [name + suffix for name in strategy_names(packed=True) for suffix in ("", "+recompute")]


def rows(p):
    short = [5, 11, 2, 30, 1, 9, 6, 24, 3, 20, 7, 10]
    return {
        "in shards": contiguous([S // p // 2] * (2 * p), p),
        "short, spread": zigzag(short, p),
        "one, spread": zigzag((S,), p),
        "half and short ones": contiguous([S // 2] + [4] * (S // 8), p),
    }


def case_of(strategy, p, mask, variant, row):
    sizes = (VARIANTS | NORMED)[variant]
    return AttentionCase(strategy, p, mask, n=N, d=D, s=S, b=1, row=row, **sizes)


@functools.cache
def model_of(p, mask, variant):
    """Fitted to the formulas of every strategy that has some."""
    v = (VARIANTS | NORMED)[variant]
    shape = dataclasses.replace(
        DESCRIPTION.model,
        hidden_size=v["h"],
        num_heads=N,
        num_kv_heads=v["g"],
        head_dim=D,
        position_embedding="none",
        normalization=v.get("qk_norm", "rmsnorm"),
    )
    dtype = str(v["dtype"]).removeprefix("torch.")
    attention = {"output_gate": 1} if v.get("gate") else {}
    attention["qk_norm"] = int("qk_norm" in v)
    halves = {"attention": attention, "mlp": {}}
    description = dataclasses.replace(
        DESCRIPTION, model=shape, p=p, dtype=dtype, attention_mask=mask, halves=halves
    )
    points = []
    for name in NAMES:
        for s in LENGTHS if not name.startswith("local_z") else ():
            z = LayerSizes(
                s=s, b=1, h=v["h"], n=N, g=v["g"], d=D, f=1, p=p, causal=mask == "causal",
                element_bytes=v["dtype"].itemsize, gate=v.get("gate", False),
                head_norm=v.get("qk_norm"),
            )  # fmt: skip
            costs = operation_costs(name, ATTENTION, z)
            # as a profile counts: the input is the operation before's, the output is kept
            numbers = [1e-3 + 1e-6 * s, 1e-3 + 1e-6 * s, *(getattr(costs, q) for q in BYTES)]
            points.append(Measurement(name, ATTENTION, s, 1, "ok", *map(float, numbers)))
    return fit_table(CostTable(description, tuple(points), Constants(0.0, 0.0)))


@functools.cache
def measured(case):
    """Of each quantity the largest that any rank has."""
    found = on_fake_ranks(case, measure_rank, range(case.p))
    return {name: max(getattr(m, name) for m in found) for name in BYTES}


@functools.cache
def measured_wide(case, groups):
    """Of each quantity the largest that any rank of all groups has."""
    p, world, found = case.p, groups * case.p, []
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            first = rank // p * p
            group, ranks, peers = (
                dist.new_group(list(of))
                for of in (range(first, first + p), range(world), range(rank % p, world, p))
            )
            found.append(measure_rank(group, case, wide=Wide(ranks, peers)))
        finally:
            dist.destroy_process_group()
    return {name: max(getattr(m, name) for m in found) for name in BYTES}


def off(costs, truth, *labels):
    """What is kept and is not predicted, and peaks above the predicted ones."""
    if abs(costs.kept_bytes / truth["kept_bytes"] - 1) > TOLERANCE:
        yield *labels, "kept_bytes", costs.kept_bytes, truth["kept_bytes"]
    for name in BYTES[1:]:
        found, peak = costs.kept_bytes + getattr(costs, name), truth["kept_bytes"] + truth[name]
        if found < (1 - TOLERANCE) * peak:
            yield *labels, name, found, peak
