"""Causal attention as 8 ranks of a balanced ring compute it, over one attention call, same work.

One process plays all ranks, one after the other, with the blocks, kernels and merges of
ring_attention.py and with nothing sent: what cutting the work in pieces and merging them costs.
On a GPU, bfloat16, heads of 128: the 96 heads of the paper's GPT, as MegatronCZ has them on
every rank, and 12, as METP has them at a time. The ratio that is told is that of the first. On a
CPU: a small one.

    .venv/bin/python benchmarks/gpu_ring.py --json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import finish, interleaved, options
from megatron_paradyse.strategies.blocks import balanced_spans, whole
from megatron_paradyse.strategies.contract import AttentionShape, Microbatch
from megatron_paradyse.strategies.kernels import choose_kernel
from megatron_paradyse.strategies.local_attention import (
    AttentionTask,
    PartialOutput,
    add_gradients_,
    local_attention,
    new_gradients,
)

P = 8


class Ring:
    """All ranks' chunks of q, k, v and of the output's gradient [s, 1, n, d]."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, task: AttentionTask):
        self.task = task
        self.spans = [balanced_spans(task.microbatch, P, rank) for rank in range(P)]
        self.q, self.k, self.v, self.grad = (self._chunks(x) for x in (q, k, v, grad))

    def _chunks(self, x: Tensor) -> list[Tensor]:
        return [torch.cat([x[span.start : span.stop] for span in spans]) for spans in self.spans]

    def whole(self, chunks: list[Tensor]) -> Tensor:
        """[s, 1, n, d] in the order of positions."""
        result = chunks[0].new_empty(P * len(chunks[0]), *chunks[0].shape[1:])
        for spans, chunk in zip(self.spans, chunks, strict=True):
            for span in spans:
                result[span.start : span.stop] = chunk[span.row : span.row + len(span)]
        return result

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        """Output and lse of every rank."""
        results = []
        for rank in range(P):
            partial = PartialOutput(self.q[rank])
            for step in range(P):
                source = (rank - step) % P
                partial.add(
                    self.k[source],
                    self.v[source],
                    q_spans=self.spans[rank],
                    k_spans=self.spans[source],
                    task=self.task,
                )
            results.append(partial.result())
        return results

    def backward(self, results: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], ...]:
        """Gradients of every chunk of q, k and v."""
        grads = tuple([new_gradients(x)[0] for x in chunks] for chunks in (self.q, self.k, self.v))
        for rank, (out, lse) in enumerate(results):
            for step in range(1, P + 1):
                source = (rank - step) % P
                add_gradients_(
                    (grads[0][rank], grads[1][source], grads[2][source]),
                    self.grad[rank], self.q[rank], self.k[source], self.v[source], out, lse,
                    q_spans=self.spans[rank], k_spans=self.spans[source], task=self.task,
                )  # fmt: skip
        return tuple([x.to(self.q[0].dtype) for x in chunks] for chunks in grads)


def run(*, s: int, n: int, d: int, dtype: torch.dtype, device: str, rounds: int) -> dict:
    random = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(s, 1, n, d, generator=random, device=device, dtype=dtype) for _ in range(4)
    )
    shape = AttentionShape(n, n, d, causal=True, softmax_scale=d**-0.5)
    task = AttentionTask(shape, Microbatch(s, 1))
    ring, spans = Ring(q, k, v, grad, task), whole(task.microbatch)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def single() -> Tensor:
        return local_attention(*leaves, spans=spans, task=task)

    sides: dict[str, Callable] = {
        "single_forward": single,
        "ring_forward": ring.forward,
        "single_forward_backward": lambda: torch.autograd.grad(single(), leaves, grad),
        "ring_forward_backward": lambda: ring.backward(ring.forward()),
    }
    out = ring.whole([out for out, _ in ring.forward()])
    error = (out - single()).float().norm() / single().float().norm()
    seconds = interleaved(sides, rounds, device)
    result = {"kernel": choose_kernel(q).name, "relative_difference": error.item()}
    for name in ("forward", "forward_backward"):
        pairs = zip(seconds[f"single_{name}"], seconds[f"ring_{name}"], strict=True)
        ratios = [single / ring for single, ring in pairs]
        quartiles = statistics.quantiles(ratios, n=4)
        result[f"ratio_to_single_call_{name}"] = statistics.median(ratios)
        result[f"ratio_to_single_call_{name}_quartiles"] = [quartiles[0], quartiles[2]]
    medians = {f"{name}_seconds": statistics.median(times) for name, times in seconds.items()}
    ratio = min(result[f"ratio_to_single_call_{name}"] for name in ("forward", "forward_backward"))
    return {"ratio_to_single_call": ratio} | result | medians


ON_GPU = [
    {"s": 32768, "n": 96, "d": 128},
    {"s": 32768, "n": 12, "d": 128},
    {"s": 131072, "n": 12, "d": 128},
]


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    if torch.cuda.is_available():
        sizes, dtype, device = ON_GPU, torch.bfloat16, "cuda"
    else:
        s = 1024 if arguments.quick else 8192
        sizes, dtype, device = [{"s": s, "n": 2, "d": 64}], torch.float32, "cpu"
    rounds = 5 if arguments.quick else 11
    found = [
        {**size, **run(**size, dtype=dtype, device=device, rounds=rounds)}
        for size in sizes[: 1 if arguments.quick else None]
    ]
    configuration = {"dtype": str(dtype), "device": device, "p": P, "b": 1, "rounds": rounds}
    result = {"ratio_to_single_call": found[0]["ratio_to_single_call"], "sizes": found}
    finish("gpu_ring", result, configuration, arguments)


if __name__ == "__main__":
    main()
