"""Run in a process of its own by `megatron-paradyse doctor`: what only importing can tell.

A JSON line per answer, at once, so that whoever reads knows what was last reached if an import
hangs or crashes: first {"begin": NAME}, then {"name": NAME, ...}.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

# Compiled packages that may be installed and yet not load; what is imported of each.
COMPILED: dict[str, str | None] = {
    "transformer-engine": "transformer_engine.pytorch",
    "apex": "fused_weight_gradient_mlp_cuda",
    "flash-attn": "flash_attn.flash_attn_interface",
    "triton": None,  # it compiles itself, with the compiler of the machine
}


def main(names: list[str]) -> None:
    """Answer for torch, then Megatron, then those of COMPILED that are named."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever imports print

    def answer(name: str, ask: Callable[[], dict[str, Any]]) -> None:
        print(json.dumps({"begin": name}), file=out, flush=True)
        try:
            values = ask()
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            values = {"error": reason[:300]}
        print(json.dumps({"name": name, **values}), file=out, flush=True)

    answer("torch", _torch)
    answer("megatron", _megatron)
    for name in names:
        module = COMPILED[name]
        answer(name, lambda module=module: _imported(module))  # type: ignore[misc]


def _torch() -> dict[str, Any]:
    import torch

    distributed = torch.distributed.is_available()
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append({"name": properties.name, "memory_bytes": properties.total_memory})
    pairs = itertools.combinations(range(len(gpus)), 2)
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "pairs_apart": [p for p in pairs if not torch.cuda.can_device_access_peer(*p)],
        "gloo": distributed and torch.distributed.is_gloo_available(),
        "nccl": distributed and torch.distributed.is_nccl_available(),
    }


def _megatron() -> dict[str, Any]:
    """The imports of a training, with the CPU platform where there is no GPU."""
    from megatron_paradyse.train import plugin

    plugin.install()
    import megatron.training.training

    return {"file": str(megatron.training.training.__file__)}


def _imported(module: str | None) -> dict[str, Any]:
    if module is not None:
        importlib.import_module(module)
        return {}
    from megatron_paradyse.strategies.with_triton import why_not

    reason = why_not()
    return {"error": reason} if reason else {}


if __name__ == "__main__":
    main(sys.argv[1:])
