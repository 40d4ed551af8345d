"""Every strategy on fake CUDA tensors; names those that fail.

In a process of its own: where another test has Megatron run on the CPU, "cuda" means that.
"""

from __future__ import annotations

import sys
import traceback

import torch

from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.strategies import RECOMPUTE, strategy_names
from tests.strategies.cases import AttentionCase, MlpCase
from tests.strategies.fake_cuda import fake_cuda
from tests.strategies.fake_ranks import on_fake_ranks
from tests.strategies.layers import rank_layer, run_and_differentiate

SIZES = {"n": 4, "g": 2, "d": 16, "h": 32}


def _cases(strategy: str) -> list[AttentionCase | MlpCase]:
    """bfloat16 runs FlashAttention, float32 the memory-efficient kernel."""
    again, half = strategy + RECOMPUTE, torch.bfloat16
    row = contiguous((30, 9, 1, 14), 2, alignment=64)
    return [
        AttentionCase(strategy, 2, **SIZES, rope="half", qk_norm="rmsnorm", gate=True, dtype=half),
        AttentionCase(again, 2, **SIZES, bias=True, qk_norm="l2", offset=True),
        AttentionCase(strategy, 2, "padded_causal", **SIZES, window=7, dtype=half),
        AttentionCase(again, 2, **SIZES, s=64, b=1, rope="half", dtype=half, row=row),
        MlpCase(strategy, 2, gated=True, bias=True, dtype=half),
        MlpCase(again, 2, tile_rows=10),
    ]


def _run(group, case) -> None:
    with fake_cuda():
        layer = rank_layer(group, case, "cuda")
        made = run_and_differentiate(layer.run, layer.x, layer.weights, layer.grad)
    output, grad_x, grads = made
    for name, tensor in {"output": output, "x": grad_x, **grads}.items():
        assert tensor is not None, name
        assert tensor.is_cuda and tensor.dtype == case.dtype, (name, tensor.device, tensor.dtype)


def main() -> None:
    failed = []
    for strategy in strategy_names():
        try:
            for case in _cases(strategy):
                on_fake_ranks(case, _run, (case.p - 1,))
        except Exception:
            traceback.print_exc()
            failed.append(strategy)
    sys.exit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
