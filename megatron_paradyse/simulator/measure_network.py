"""Latency and bandwidth of every collective on the ranks that there are, measured."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_paradyse.moments import slowest_seconds
from megatron_paradyse.simulator.network import COLLECTIVES, AlphaBeta, Network, write_network
from megatron_paradyse.strategies import transport

SECONDS_PER_SIZE, MAX_REPETITIONS = 0.3, 20
SMALLEST, LARGEST_ON_CPU, LARGEST = 1 << 12, 1 << 22, 1 << 28  # bytes of a rank's message
FASTEST = 1e15  # bytes per second, where a longer message took no longer


def measure_network(output: str) -> Network:
    """Measure on this rank of torchrun's group; rank 0 writes output. All ranks must call it."""
    on_gpu = torch.cuda.is_available()
    backend = "nccl" if on_gpu else "gloo"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend)
    group: Any = dist.new_group(list(range(dist.get_world_size())))
    largest = LARGEST if on_gpu else LARGEST_ON_CPU
    sizes = [SMALLEST << (2 * i) for i in range(20) if SMALLEST << (2 * i) <= largest]
    found = {}
    for name in COLLECTIVES:
        points = [_point(name, size, group, "cuda" if on_gpu else "cpu") for size in sizes]
        found[name] = fit_alpha_beta(points)
    p = dist.get_world_size()
    network = Network(f"measured {backend}, {p} ranks", p, "measured", found)
    if dist.get_rank() == 0:
        write_network(output, network)
    dist.barrier(group)
    dist.destroy_process_group()
    return network


def fit_alpha_beta(points: list[tuple[float, float]]) -> AlphaBeta:
    """Through (sent bytes, seconds), by least squares of the relative error; neither negative."""
    sent, seconds = (np.array(values, dtype=np.float64) for values in zip(*points, strict=True))
    columns = np.stack([1 / seconds, sent / seconds], axis=1)
    ones = np.ones(len(points))
    found = []
    for used in ((0, 1), (1,), (0,)):
        solution, *_ = np.linalg.lstsq(columns[:, used], ones, rcond=None)
        if (solution >= 0).all():
            error = np.sum((columns[:, used] @ solution - ones) ** 2)
            found.append((error, dict(zip(used, solution, strict=True))))
    _, best = min(found, key=lambda of: of[0])
    per_byte = float(best.get(1, 0.0))
    return AlphaBeta(float(best.get(0, 0.0)), 1 / per_byte if per_byte > 1 / FASTEST else FASTEST)


def _point(name: str, size: int, group, device: str) -> tuple[float, float]:
    """(sent bytes, seconds) for messages of `size` bytes: median over runs of the slowest rank."""
    begin, sent = _communication(name, torch.ones(size, dtype=torch.uint8, device=device), group)
    slowest_seconds(begin, group, device)
    once = slowest_seconds(begin, group, device)
    repetitions = max(2, min(MAX_REPETITIONS, int(SECONDS_PER_SIZE / once)))
    return sent, statistics.median(
        slowest_seconds(begin, group, device) for _ in range(repetitions)
    )


def _communication(name: str, x: Tensor, group) -> tuple[Callable[[], list], float]:
    """What begins a collective of x, of which each rank has one, and the bytes that it sends."""
    p, rank = group.size(), group.rank()
    around = {"to": (rank + 1) % p, "source": (rank - 1) % p}
    if name == "all_gather":
        gathered = x.new_empty(p * len(x))
        return lambda: transport.all_gather(gathered, x, group), (p - 1) * x.nbytes
    if name == "reduce_scatter":
        whole = x.repeat(p).view(torch.float32)
        part = whole.new_empty(len(whole) // p)
        return lambda: transport.reduce_scatter(part, whole, group), (p - 1) * x.nbytes
    into = torch.empty_like(x)
    if name == "all_to_all":
        blocks = x[: len(x) // p * p].view(p, -1)
        received = torch.empty_like(blocks)
        sent = blocks.nbytes * (p - 1) // p
        return lambda: transport.all_to_all(received, blocks, group), sent
    if name == "exchange":
        return lambda: transport.exchange(into, x, group, **around), x.nbytes
    if name == "broadcast":
        return lambda: transport.broadcast(x, group, owner=0), x.nbytes
    values = x.view(torch.float32)
    if name == "reduce":
        return lambda: transport.reduce(values, group, owner=0), x.nbytes
    assert name == "all_reduce", name
    return lambda: [dist.all_reduce(values, group=group, async_op=True)], 2 * (p - 1) * x.nbytes / p
