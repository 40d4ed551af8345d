"""Causal attention with dropout over the same without: what hashing and dropping scores cost.

Sides take turns: the kernel that choose_kernel takes for dropout (fused_tiles.py on a GPU), the one
without dropout (FlashAttention's on a GPU), and tiled_kernel.py, of PyTorch's operations, which
dropout takes where neither runs. On a GPU, bfloat16, heads of 128. On a CPU, where the first is the
third: a small one.

    .venv/bin/python benchmarks/gpu_dropout.py --json
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import finish, interleaved, options
from megatron_paradyse.strategies.kernels import TILED, Kernel, choose_kernel
from megatron_paradyse.strategies.tiled_kernel import BlockRule

DROPOUT = 0.1
ON_GPU = [{"s": 4096, "n": 16}, {"s": 16384, "n": 16}, {"s": 65536, "n": 4}]
LONGEST_TILED = 16384  # beyond it, seconds


def run(*, s: int, n: int, d: int, dtype: torch.dtype, device: str, rounds: int) -> dict:
    random = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, n, s, d, generator=random, device=device, dtype=dtype) for _ in range(4)
    )
    plain = BlockRule(scale=d**-0.5, causal=True)
    drops = BlockRule(scale=d**-0.5, causal=True, dropout=DROPOUT, dropout_seed=1)
    kernels = {"dropout": choose_kernel(q, dropout=True), "none": choose_kernel(q)}
    if s <= LONGEST_TILED and kernels["dropout"] is not TILED:
        kernels["tiled"] = TILED

    def forward(kernel: Kernel, rule: BlockRule) -> tuple[torch.Tensor, ...]:
        return kernel.forward(q, k, v, rule)

    def both(kernel: Kernel, rule: BlockRule) -> None:
        out, lse = forward(kernel, rule)
        kernel.backward(grad, q, k, v, out, lse, rule)

    sides: dict[str, Callable[[], object]] = {}
    for name, kernel in kernels.items():
        rule = plain if name == "none" else drops
        sides[f"{name}_forward"] = functools.partial(forward, kernel, rule)
        sides[f"{name}_both"] = functools.partial(both, kernel, rule)
    seconds = interleaved(sides, rounds, device)
    result: dict[str, object] = {"kernels": {name: kernel.name for name, kernel in kernels.items()}}
    for other in [name for name in kernels if name != "dropout"]:
        for side in ("forward", "both"):
            pairs = zip(seconds[f"dropout_{side}"], seconds[f"{other}_{side}"], strict=True)
            result[f"{side}_over_{other}"] = statistics.median(a / b for a, b in pairs)
    return result | {f"{name}_seconds": statistics.median(x) for name, x in seconds.items()}


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    if torch.cuda.is_available():
        sizes, d, dtype, device = ON_GPU, 128, torch.bfloat16, "cuda"
    else:
        s = 256 if arguments.quick else 2048
        sizes, d, dtype, device = [{"s": s, "n": 2}], 64, torch.float32, "cpu"
    rounds = 5 if arguments.quick else 11
    found = [
        {**size, **run(**size, d=d, dtype=dtype, device=device, rounds=rounds)}
        for size in sizes[: 1 if arguments.quick else None]
    ]
    of = {"dtype": str(dtype), "device": device, "d": d, "dropout": DROPOUT, "rounds": rounds}
    result = {"both_over_none": max(size["both_over_none"] for size in found), "sizes": found}
    finish("gpu_dropout", result, of, arguments)


if __name__ == "__main__":
    main()
