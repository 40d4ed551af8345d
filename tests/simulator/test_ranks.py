"""A simulation runs some ranks for all: these need as much of everything as any other."""

from __future__ import annotations

import itertools
import random
from dataclasses import astuple

import pytest

from megatron_paradyse.simulator.run import ranks_that_differ
from megatron_paradyse.strategies.accounting import _costs_of_rank
from megatron_paradyse.strategies.sizes import LayerSizes

ENDINGS = ("", "+recompute", "+offload")


def _random_sizes(rng: random.Random, p: int) -> LayerSizes:
    g = rng.choice([p, 2 * p])
    n, d = g * rng.choice([1, 2, 4]), rng.choice([8, 16, 64, 128])
    return LayerSizes(
        s=p * 2 * rng.choice([8, 64, 512, 4096, 32768]),
        b=rng.choice([1, 2]),
        h=rng.choice([n * d, 64 * p]),
        n=n,
        g=g,
        d=d,
        f=4 * p,
        p=p,
        element_bytes=rng.choice([2, 4]),
        causal=rng.random() < 0.8,
        bias=rng.random() < 0.5,
        rope_channels=rng.choice([0, d]),
    )


@pytest.mark.parametrize("p", range(2, 10))
def test_no_other_rank_needs_more_by_the_formulas(p):
    rng = random.Random(p)
    names = [f"{base}{how}" for base in ("megatron_cz", "metp", "ulysses_z") for how in ENDINGS]
    for name, _ in itertools.product(names, range(60)):
        sizes = _random_sizes(rng, p)
        costs = [astuple(_costs_of_rank(name, "attention", sizes, rank)) for rank in range(p)]
        stand = ranks_that_differ(name, "attention", p=p, causal=sizes.causal)
        most = [max(of_ranks) for of_ranks in zip(*(costs[rank] for rank in stand), strict=True)]
        assert most == [max(of_ranks) for of_ranks in zip(*costs, strict=True)], (name, sizes)


def test_of_one_rank_there_is_no_other():
    for causal in (True, False):
        assert ranks_that_differ("metp", "attention", p=1, causal=causal) == (0,)
