"""One rank of benchmarks/edges.py: which tensors live outside the layers, and who made them."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import torch

from megatron_paradyse.costs.table import EMBEDDING, HEAD
from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.train import plugin

VIEWS = ("slice", "view", "split", "transpose", "expand", "select", "alias", "detach")
THROUGH = ("live_bytes", "cpu_platform", "collectives", "tiles")
MAKERS = ("/megatron/core/", "/megatron/training/", "/megatron_paradyse/")


class WhoMadeIt(LiveBytes):
    """Knows which function of Megatron or of ours made each live storage, also at the peak."""

    def __init__(self):
        super().__init__()
        self.makers: dict[int, tuple[str, int]] = {}
        self.at_peak: dict[int, tuple[str, int]] = {}
        self._operator = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._operator = func.__name__.split(".")[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _see(self, storage) -> None:
        known, peak = storage._cdata in self._seen, self.peak_bytes
        super()._see(storage)
        if not known:
            made = "made before" if self._operator in VIEWS else self._operator
            self.makers[storage._cdata] = f"{_maker()} {made}", storage.nbytes()
        if self.peak_bytes > peak:
            self.at_peak = dict(self.makers)

    def _forget(self, key: int, size: int) -> None:
        super()._forget(key, size)
        self.makers.pop(key, None)

    def reset_peak(self) -> None:
        super().reset_peak()
        self.at_peak = dict(self.makers)


def _maker() -> str:
    """The innermost function of Megatron or of ours, as file:function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path, function = frame.f_code.co_filename, frame.f_code.co_name
        if any(part in path for part in MAKERS) and Path(path).stem not in THROUGH:
            return f"{Path(path).name}:{function}"
        frame = frame.f_back
    return "the graph below"


def main() -> None:
    task = json.loads(os.environ["EDGES"])
    plugin.install()
    from megatron.training import training
    from megatron.training.arguments import parse_and_validate_args

    from megatron_paradyse.profiler.model import build_model
    from megatron_paradyse.profiler.operations import Operations

    args = parse_and_validate_args()
    training.initialize_megatron()
    args.check_for_nan_in_loss_and_grad = False
    model = build_model(1)
    found: dict[str, Counter] = {}
    for length in (min(task["lengths"]), *task["lengths"]):  # the first warms up
        operations = Operations(model, length, 1)
        for name in (EMBEDDING, HEAD):
            for moment, bytes_by_maker in _moments(operations.get(name, "megatron_ts")).items():
                found[f"{name} {moment} {length}"] = bytes_by_maker
    if torch.distributed.get_rank() == 0:
        Path(task["output"]).write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)  # nothing to flush; tearing gloo down costs seconds


def _moments(operation) -> dict[str, Counter]:
    """Bytes by maker: at the forward's peak, kept for the backward, at the backward's peak."""
    meter = WhoMadeIt()
    with meter:
        x = operation.make_input()
        meter.reset_peak()
        output, held = operation.forward(x)
        del x
        forward, kept = meter.at_peak, dict(meter.makers)
        meter.reset_peak()
        if output.dim() > 0:  # the embedding's: its gradient comes from the first layer
            output.backward(torch.full_like(output, 1e-3))
        else:
            output.backward()
        backward = meter.at_peak
    del held
    moments = {"forward": forward, "kept": kept, "backward": backward}
    return {moment: _sum(makers.values()) for moment, makers in moments.items()}


def _sum(makers) -> Counter:
    total: Counter = Counter()
    for maker, size in makers:
        total[maker] += size
    return total


if __name__ == "__main__":
    main()
