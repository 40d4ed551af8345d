"""Bytes counted on real gloo ranks: the same every time, and those of a group that moves nothing.

On the fake process group a buffer is there for exactly as long as the code holds it. gloo's threads
hold the buffers of ended collectives a little longer, now and then; its reduce_scatter has a copy
of its input, which waiting for it shows. Neither may be counted.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.strategies.walks import WALKS
from tests.strategies.cases import AttentionCase, MlpCase
from tests.strategies.fake_ranks import measure_rank
from tests.strategies.harness import run_ranks

P, REPEATS = 4, 3


def _case(strategy: str, operation: str) -> AttentionCase | MlpCase:
    if operation == "mlp":
        return MlpCase(strategy, P, h=64, f=256, s=256, b=1)
    return AttentionCase(strategy, P, "causal", n=8, g=8, d=8, h=64, s=256, b=1)


def _measure_often(group, case) -> list:
    return [measure_rank(group, case) for _ in range(REPEATS)]


def _on_fake_rank(rank: int, case):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=P)
    try:
        return measure_rank(dist.new_group(list(range(P))), case)
    finally:
        dist.destroy_process_group()


def test_bytes_on_real_ranks_repeat_and_are_those_that_the_code_holds():
    cases = {f"{name}+{part}": _case(name, part) for name, part in WALKS}
    cases |= {
        f"{name}-again+{part}": _case(f"{name}+recompute", part)
        for name, part in WALKS
        if name != "colossal_z"
    }
    found = run_ranks(P, _measure_often, cases)
    for name, case in cases.items():
        for rank in range(P):
            assert found[name][rank] == [_on_fake_rank(rank, case)] * REPEATS, (name, rank)


def _collectives(group, _) -> dict[str, list]:
    """Results under the counter, and the bytes that it saw."""
    rank, p = group.rank(), group.size()
    x = torch.full((2,), float(rank))
    own = torch.zeros(2 * p)
    own[2 * rank : 2 * rank + 2] = x
    parts = [torch.empty(2) for _ in range(p)]
    total, scattered = x.clone(), torch.arange(2.0 * p)
    counter = LiveBytes([x, own, *parts, total, scattered])
    with counter:
        dist.all_gather_into_tensor(own, own[2 * rank : 2 * rank + 2], group=group)
        dist.all_gather(parts, x, group=group)
        dist.all_reduce(total, group=group)
        dist.reduce_scatter_tensor(scattered[2 * rank : 2 * rank + 2], scattered, group=group)
    results = [own, *parts, total, scattered[2 * rank : 2 * rank + 2]]
    return {"results": [t.tolist() for t in results], "peak": [counter.peak_bytes]}


def test_collectives_give_their_results_under_the_counter_in_place_too():
    found = run_ranks(P, _collectives, {"all": None})["all"]
    by_rank = [float(rank) for rank in range(P)]
    for rank in range(P):
        own, *parts, total, scattered = found[rank]["results"]
        assert own == [value for value in by_rank for _ in range(2)]
        assert parts == [[value] * 2 for value in by_rank]
        assert total == [sum(by_rank)] * 2
        assert scattered == [P * 2.0 * rank, P * (2.0 * rank + 1)]
        assert found[rank]["peak"] == [0]
