"""One rank of benchmarks/strategies.py: a gloo rank, or on a GPU the stand-in for one of p."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megatron_paradyse.doors import opened
from megatron_paradyse.errors import UserError
from megatron_paradyse.simulator.network import free_network
from megatron_paradyse.simulator.traffic import NoClock, Traffic, fill_with_own, strategy_doors
from megatron_paradyse.strategies import get_strategy, strategy_names
from megatron_paradyse.strategies.contract import (
    AttentionShape,
    AttentionWeights,
    Microbatch,
    MlpShape,
    MlpWeights,
    Strategy,
)
from megatron_paradyse.strategies.memory import measure


@dataclass
class Layer:
    """The attention and the MLP of one layer on this rank: input, shards, output gradient."""

    shape: AttentionShape
    mlp_shape: MlpShape
    attention: AttentionWeights
    mlp: MlpWeights
    x: Tensor
    grad: Tensor
    s: int

    @property
    def parameters(self) -> list[Tensor]:
        return [self.attention.qkv, self.attention.proj, self.mlp.fc1, self.mlp.fc2]

    def forward(self, strategy: Strategy, group: dist.ProcessGroup) -> Tensor:
        microbatch = Microbatch(self.s, self.x.shape[1])
        y = strategy.attention(self.x, self.attention, self.shape, microbatch, group)
        return strategy.mlp(y, self.mlp, self.mlp_shape, group)

    def step(self, strategy: Strategy, group: dist.ProcessGroup) -> None:
        output = self.forward(strategy, group)
        torch.autograd.grad(output, [self.x, *self.parameters], self.grad)


def make_layer(
    *, s: int, p: int, h: int, n: int, g: int, f: int, gated: bool, device: str, dtype: torch.dtype
) -> Layer:
    d = h // n

    def new(*size: int) -> Tensor:
        values = torch.randn(*size, device=device, dtype=dtype) * size[-1] ** -0.5
        return values.requires_grad_()

    return Layer(
        shape=AttentionShape(n, g, d, causal=True, softmax_scale=d**-0.5),
        mlp_shape=MlpShape(F.silu if gated else F.gelu, gated),
        attention=AttentionWeights(new((n + 2 * g) * d // p, h), new(h, n * d // p)),
        mlp=MlpWeights(new((2 if gated else 1) * f // p, h), new(h, f // p)),
        x=new(s // p, 1, h),
        grad=new(s // p, 1, h).detach(),
        s=s,
    )


def main() -> None:
    task = json.loads(os.environ["STRATEGIES"])
    torch.manual_seed(int(os.environ["RANK"]))
    group = _join_group(task["stand_in"])
    doors = strategy_doors(Traffic(free_network(group.size()), NoClock(), fill_with_own))
    with opened(doors if task["stand_in"] is not None else []):
        rows = _all_rows(task, group)
    if os.environ["RANK"] == "0":
        Path(task["output"]).write_text(json.dumps(rows))
    dist.barrier(group)
    dist.destroy_process_group()


def _all_rows(task: dict, group: dist.ProcessGroup) -> list[dict]:
    rows = []
    for name, sizes, rounds_of in task["grid"]:
        for s, rounds in rounds_of.items():
            for row in _rows(group, sizes, int(s), rounds, on_gpu=task["stand_in"] is not None):
                rows.append({"layer": name, **row})
                if os.environ["RANK"] == "0":
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _join_group(stand_in: int | None) -> dist.ProcessGroup:
    if stand_in is None:
        dist.init_process_group("gloo")
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=stand_in - 1, world_size=stand_in)
    group = dist.new_group(list(range(dist.get_world_size())))
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group


def _rows(group, sizes: dict, s: int, rounds: int, *, on_gpu: bool) -> list[dict]:
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    layer = make_layer(s=s, p=group.size(), **sizes, device=device, dtype=dtype)
    used, rows = {}, {}
    for name in strategy_names():
        strategy, row = get_strategy(name), {"strategy": name, "p": group.size(), "s": s}
        try:
            strategy.check(layer.shape, group.size())
            used[name] = strategy
            rows[name] = row | _bytes(layer, strategy, group)
        except UserError as error:
            rows[name] = row | {"refused": str(error)}
        except torch.OutOfMemoryError:
            del used[name]
            rows[name] = row | {"refused": "out of memory"}
    for name, seconds in _seconds(layer, used, group, rounds).items():
        quartiles = statistics.quantiles(seconds, n=4)
        rows[name]["seconds"] = statistics.median(seconds)
        rows[name]["seconds_quartiles"] = [quartiles[0], quartiles[2]]
        rows[name]["rounds"] = rounds
    return list(rows.values())


def _bytes(layer: Layer, strategy: Strategy, group) -> dict:
    """Of this rank; running it once also warms up."""
    run = measure(lambda: layer.forward(strategy, group), layer.x, layer.parameters, layer.grad)
    measured = asdict(run)
    sent = measured.pop("forward_sent_bytes") + measured.pop("backward_sent_bytes")
    return {"comm_bytes": sent, **measured}


def _seconds(layer: Layer, strategies: dict[str, Strategy], group, rounds: int) -> dict:
    """Of the whole group, from a barrier to a barrier; who begins a round changes."""
    seconds: dict[str, list[float]] = {name: [] for name in strategies}
    names = list(strategies)
    for i in range(-1, rounds):  # the first warms up
        first = i % len(names) if names else 0
        for name in names[first:] + names[:first]:
            _wait_for_all(layer.x, group)
            start = time.perf_counter()
            layer.step(strategies[name], group)
            _wait_for_all(layer.x, group)
            if i >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _wait_for_all(x: Tensor, group) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()
    else:
        dist.barrier(group)


if __name__ == "__main__":
    main()
