"""What a rank's layer holds, on a process group that moves nothing and holds nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_paradyse.strategies.contract import Wide
from megatron_paradyse.strategies.memory import Measured, measure
from megatron_paradyse.strategies.sizes import LayerSizes
from tests.strategies.cases import AttentionCase, MlpCase
from tests.strategies.layers import rank_layer


def on_fake_ranks(case: AttentionCase | MlpCase, job, ranks: Iterable[int]) -> list:
    """job(group, case) as each of these ranks of p."""
    results = []
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.p)
        try:
            results.append(job(dist.new_group(list(range(case.p))), case))
        finally:
            dist.destroy_process_group()
    return results


def measure_rank(group, case: AttentionCase | MlpCase, *, wide: Wide | None = None) -> Measured:
    layer = rank_layer(group, case, wide=wide)
    has_rope = isinstance(case, AttentionCase) and case.rope is not None
    others = [layer.microbatch.rope] if has_rope else []
    x, weights = layer.x, layer.weights
    parameters = [t for f in fields(weights) if (t := getattr(weights, f.name)) is not None]
    return measure(lambda: layer.run(x, weights), x, parameters, layer.grad, others=others)


def sizes_of(case: AttentionCase | MlpCase) -> LayerSizes:
    common = {"s": case.s, "b": case.b, "h": case.h, "p": case.p, "bias": case.bias}
    common["element_bytes"] = case.dtype.itemsize
    if isinstance(case, MlpCase):
        return LayerSizes(n=1, g=1, d=1, f=case.f, gated=case.gated, **common)
    return LayerSizes(
        n=case.n,
        g=case.g,
        d=case.d,
        f=1,
        causal=case.mask == "causal",
        rope_channels=0 if case.rope is None else case.d,
        gate=case.gate,
        head_norm=case.qk_norm,
        **common,
    )
