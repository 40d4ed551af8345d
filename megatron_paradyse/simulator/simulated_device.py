"""A device that allocates nothing and computes nothing: it counts bytes and adds up seconds."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_paradyse.doors import Door, opened
from megatron_paradyse.live_bytes import LiveBytes
from megatron_paradyse.simulator.clock import Clock
from megatron_paradyse.simulator.hardware import Device
from megatron_paradyse.simulator.kernel_times import KernelTimes
from megatron_paradyse.strategies import heads, rms_norm


class SimulatedDevice(LiveBytes):
    """Counts live bytes as on a CPU, and puts the seconds of every kernel on a clock."""

    def __init__(self, device: Device):
        super().__init__()
        self.clock = Clock(device.host_seconds_per_kernel, device.host_seconds_per_collective)
        self._times = KernelTimes(device)
        self._fusing = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not self._fusing:
            seconds = self._times.seconds(func, args, kwargs or {}, result)
            if seconds is not None:
                self.clock.kernel(seconds)
        return result

    @contextlib.contextmanager
    def scores(self, count: int) -> Iterator[None]:
        """Attention inside computes so many scores per head, and not all that are not masked."""
        self._times.num_scores = count
        try:
            yield
        finally:
            self._times.num_scores = None

    def fused(self, function: Callable) -> Callable:
        """The function as one kernel: reads its arguments and writes its result once.

        What it allocates and lets go of inside is in registers; what stays, stays counted.
        """

        @functools.wraps(function)
        def run(*args, **kwargs):
            if self._fusing:
                return function(*args, **kwargs)
            peak, self._fusing = self.peak_bytes, True
            try:
                result = function(*args, **kwargs)
            finally:
                self._fusing = False
            self.peak_bytes = max(peak, self.live_bytes)
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.clock.kernel(self._times.traffic_seconds(sum(t.nbytes for t in tensors)))
            return result

        return run


MEGATRON = "megatron.core.fusions"
# What Megatron gives to its jit_fuser and a layer may run, and what is one kernel on a GPU.
FUSED = {
    f"{MEGATRON}.fused_bias_gelu": ("bias_gelu", "bias_gelu_back"),
    f"{MEGATRON}.fused_bias_swiglu": (
        *("swiglu", "bias_swiglu", "swiglu_back", "bias_swiglu_back"),
        *("weighted_swiglu", "weighted_swiglu_back"),
    ),
    f"{MEGATRON}.fused_bias_geglu": (
        *("weighted_quick_geglu", "weighted_quick_geglu_back"),
        *("weighted_bias_quick_geglu", "weighted_bias_quick_geglu_back"),
    ),
    f"{MEGATRON}.fused_weighted_squared_relu": (
        *("weighted_squared_relu", "weighted_squared_relu_back"),
    ),
    f"{MEGATRON}.fused_bias_dropout": ("bias_dropout_add_fused_train",),
    "megatron_paradyse.strategies.rms_norm": ("normalise", "normalise_backward"),
}


@contextlib.contextmanager
def fused_functions(device: SimulatedDevice) -> Iterator[None]:
    """Fused functions are one kernel each, as on a GPU; on a CPU they run as written."""
    import importlib

    doors: list[Door] = [
        (rms_norm, "tiles", lambda x: [slice(None)]),  # one kernel takes all rows
        (heads, "sums_in_half_type", lambda x: False),
    ]
    for module_name, names in FUSED.items():
        module = importlib.import_module(module_name)
        doors += [(module, name, device.fused(getattr(module, name))) for name in names]
    with opened(doors):
        yield
