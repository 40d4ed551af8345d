"""One rank of benchmarks/head.py: Megatron's head and the same in tiles, in turns."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_paradyse import cpu_platform


@dataclass(frozen=True)
class Head:
    """An output layer that can run either way, and one microbatch on this rank."""

    layer: Any
    x: Tensor
    labels: Tensor
    mask: Tensor
    learnt: Tensor | None = None  # the mask of data of which a quarter is learnt

    def losses(self, way: str) -> Tensor:
        if way != "megatron":
            self.layer.learns_all = way == "tiles"
            return self.layer(self.x, labels=self.labels, loss_mask=self.mask_of(way))
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        logits, _ = self.layer(self.x)
        labels = self.labels.transpose(0, 1).contiguous()
        return vocab_parallel_cross_entropy(logits, labels).transpose(0, 1).contiguous()

    def mask_of(self, way: str) -> Tensor:
        return self.learnt if way == "quarter" and self.learnt is not None else self.mask

    def run(self, way: str, *, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Losses, and gradients of the mean over the tokens that count, as training computes it."""
        losses = self.losses(way)
        mask = self.mask_of(way) if mask is None else mask
        mean = (losses.flatten() * mask.flatten()).sum() / mask.sum()
        return losses.detach(), *torch.autograd.grad(mean, [self.x, self.layer.weight])


def make_layer(*, h: int, v: int, p: int, tile: int | None, dtype: torch.dtype):
    """Megatron's ColumnParallelLinear [v/p, h], able to go in tiles of `tile` tokens, or auto."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megatron_paradyse.edges.tiles import automatic_tile
    from megatron_paradyse.model_edges import TiledOutputLayer

    config = ModelParallelConfig(
        tensor_model_parallel_size=p,
        sequence_parallel=p > 1,
        params_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
    )
    config._cpu_offloading_context = None
    layer: Any = ColumnParallelLinear(
        h, v, config=config, init_method=torch.nn.init.zeros_, bias=False
    )
    layer.tile = tile or automatic_tile(h=h, vocab_shard=v // p, element_bytes=dtype.itemsize)
    layer.__class__ = TiledOutputLayer
    return layer


def main() -> None:
    cpu_platform.install()
    from megatron.core import parallel_state

    task = json.loads(os.environ["HEAD"])
    dist.init_process_group("gloo")
    p, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=p)
    rows = []
    for shape in task["shapes"]:
        head = _make_head(**shape, p=p, rank=rank)
        error = _error(head)
        seconds = _measure(head, task["pairs"])
        wall, processor = ([_ratio(pair, i) for pair in seconds] for i in (0, 1))
        quarter = [pair["quarter"][0] / pair["tiles"][0] for pair in seconds]
        rows.append(
            {
                **shape,
                "p": p,
                "tile": head.layer.tile,
                "time_ratio": statistics.median(wall),
                "time_ratio_quartiles": statistics.quantiles(wall, n=4)[::2],
                "processor_time_ratio": statistics.median(processor),
                "quarter_learnt_over_all": statistics.median(quarter),
                "megatron_seconds": statistics.median(pair["megatron"][0] for pair in seconds),
                "tiles_seconds": statistics.median(pair["tiles"][0] for pair in seconds),
                "max_rel_error_fp32": error,
            }
        )
        if rank == 0:
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if rank == 0:
        Path(task["output"]).write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)  # nothing to flush; tearing gloo down costs seconds


def _make_head(*, s: int, h: int, v: int, tile: int | None = None, p: int, rank: int) -> Head:
    generator = torch.Generator().manual_seed(s + v)
    layer = make_layer(h=h, v=v, p=p, tile=tile, dtype=torch.float32)
    weight = torch.randn(v, h, generator=generator) * h**-0.5
    layer.weight.data.copy_(weight.chunk(p)[rank])
    x = torch.randn(s, 1, h, generator=generator).chunk(p)[rank].clone().requires_grad_()
    labels = torch.randint(v, (1, s), generator=generator)
    mask = (torch.rand(1, s, generator=generator) < 0.9).float()
    learnt = (torch.rand(1, s, generator=generator) < 0.25).float()
    return Head(layer, x, labels, mask, learnt)


def _error(head: Head) -> float:
    """Largest difference over the largest value: of losses, grad_x and grad_weight, any rank.

    Where a quarter is learnt, of its losses.
    """
    pairs = list(zip(head.run("tiles"), head.run("megatron"), strict=True))
    (mine, *my_grads), learnt = head.run("quarter"), head.mask_of("quarter")
    theirs, *grads = head.run("megatron", mask=learnt)
    pairs += zip((mine * learnt, *my_grads), (theirs * learnt, *grads), strict=True)
    error = torch.tensor(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return float(error)


Seconds = tuple[float, float]  # of the wall clock; of this rank's processor


def _measure(head: Head, pairs: int) -> list[dict[str, Seconds]]:
    """Seconds of forward and backward; who begins alternates, the first pair warms up."""
    seconds = []
    for pair in range(-1, pairs):
        ways = ("tiles", "quarter", "megatron")
        found = {way: _seconds(head, way) for way in (ways if pair % 2 else ways[::-1])}
        if pair >= 0:
            seconds.append(found)
    return seconds


def _seconds(head: Head, way: str) -> Seconds:
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    head.run(way)
    processor = time.process_time() - processor
    dist.barrier()
    return time.perf_counter() - wall, processor


def _ratio(pair: dict[str, Seconds], clock: int) -> float:
    return pair["tiles"][clock] / pair["megatron"][clock]


if __name__ == "__main__":
    main()
