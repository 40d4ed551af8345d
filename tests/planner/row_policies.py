"""Policies by cost for packed rows, and what they say rows take."""

from __future__ import annotations

import dataclasses
import random

from megatron_paradyse.packing.load import load_of
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.planner.cost_settings import Costs
from megatron_paradyse.planner.from_costs import Stage
from megatron_paradyse.planner.from_file import ALIGNMENT, FilePolicies
from megatron_paradyse.planner.row_prices import RowPrices
from megatron_paradyse.settings import Settings
from tests.packing.rows import random_row

P = 4
LAYERS = (1, 2)
BASES = ("megatron_ts", "megatron_cz", "metp")
NAMES = (*BASES, *(f"{name}+recompute" for name in BASES))
LOCAL = ("local_z", "local_z+recompute")
MIB = 1 << 20


def policies(file, names=(*LOCAL, *NAMES), **settings):
    settings = Settings(policy="optimal", memory_margin=0.0, **settings)
    return FilePolicies(settings, Costs(file, names, names), 0)


def policy(file, budget_mib=1 << 20, names=(*LOCAL, *NAMES), *, correct=None, **settings):
    stage = Stage(budget_bytes=budget_mib * MIB, static_bytes=0)
    return policies(file, names, **settings).policy(stage, smooth=False, correct=correct)


def prices_by(chooses, model):
    """Of the rows that a policy plans, of the layers alone."""
    return RowPrices(chooses, model, LAYERS, alignment=ALIGNMENT, edge_seconds=lambda s: 0.0)


def prices(file, budget_mib):
    return prices_by(policy(file, budget_mib), file.require_model())


def best_plan(chooses, row):
    """By the costs of the row itself, not of what stands for all rows like it."""
    s = chooses.rows.load(row).seq_length
    exact = dataclasses.replace(load_of(row, causal=True), seq_length=s)
    return chooses.planner.plan(chooses.problem(LAYERS, 1, s, False, exact))


def local_row(rng, *, longest=8192):
    """Documents of which none is on two ranks."""
    size = rng.randint(2, longest // P) * 16
    return contiguous([size // 4] * 4 * P, P, alignment=2 * P)


def rows(count, *, longest=2000):
    rng = random.Random(0)
    for _ in range(count):
        yield random_row(rng, P, longest=longest)
        yield local_row(rng)
