"""Lets Megatron 0.19 run on CPU ranks with gloo, where there is no GPU.

Megatron names the device "cuda" in places that no flag reaches. install() makes those calls land on
the CPU: the arithmetic is then PyTorch's own on CPU tensors, and nothing else changes. It must be
called before megatron is imported, only when torch.cuda.is_available() is False, and once.

torch.cuda.is_available() stays False: True would start pinned-memory loaders, Adam's capture check
and the compiler's CUDA paths.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import time
import types
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_paradyse import gpu_packages, megatron_start
from megatron_paradyse.errors import UserError

# Megatron flags that a machine without a GPU needs; applied to the parsed arguments.
CPU_ARGUMENTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
    "async_tensor_model_parallel_allreduce": False,
    **megatron_start.WITHOUT_ENGINE,
    **megatron_start.WITHOUT_APEX,
    **megatron_start.WITHOUT_GRADIENT_KERNEL,
    **megatron_start.WITHOUT_SOFTMAX_KERNEL,
}

_installed = False


class _CudaMeansCpu(TorchFunctionMode):
    """Redirects device="cuda", in any spelling, to the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if kwargs and "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*args, **(kwargs or {}))


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _Stream:
    """A stream of a device that runs everything at once, in order."""

    def __init__(self, *args, **kwargs):
        self.device = torch.device("cpu")

    def wait_stream(self, stream) -> None: ...

    def wait_event(self, event) -> None: ...

    def record_event(self, event=None):
        event = event or _Event()
        event.record(self)
        return event

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None: ...


class _Event(_Stream):
    seconds = 0.0

    def record(self, stream=None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream=None) -> None: ...

    def elapsed_time(self, end) -> float:
        """Milliseconds, as an inference engine of Megatron's logs them."""
        return (end.seconds - self.seconds) * 1e3


def install() -> None:
    """Patch torch and, once it is imported, Megatron; announce it in one log line.

    Raises RuntimeError on a machine with a GPU.
    """
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError("cpu_platform.install() on a machine with a GPU")
    if _installed:
        return
    _installed = True
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    megatron_start.use_one_connection()  # Megatron asks for it, in vain here
    gpu_packages.hide_all()
    warnings.filterwarnings("ignore", message="Apex is not installed")
    warnings.filterwarnings("ignore", message=".*Transformer Engine and Apex are not installed")
    warnings.filterwarnings("ignore", message="Only transformer-engine")
    torch._dynamo.config.disable = True
    _patch_torch()
    _patch_megatron()
    megatron_start.say_once("no GPU found, Megatron runs on the CPU with gloo")


def apply_arguments(args) -> None:
    """Set the Megatron arguments that a CPU needs on a parsed namespace, in place.

    UserError for what Megatron builds on GPUs alone.
    """
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if getattr(args, name, False):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} needs GPUs, and there is none: leave {flag} out")
    for name, value in CPU_ARGUMENTS.items():
        if hasattr(args, name):
            setattr(args, name, value)
    if getattr(args, "async_save", False):  # Megatron's worker would end at once, and ranks wait
        args.async_save = args.use_persistent_ckpt_worker = False
        megatron_start.say_once("--async-save needs a GPU: checkpoints are saved at once")
    if getattr(args, "profile", False) and not args.use_pytorch_profiler:
        args.profile = False
        megatron_start.say_once("--profile needs a GPU, or --use-pytorch-profiler: left out")
    if getattr(args, "record_memory_history", False):
        args.record_memory_history = False
        megatron_start.say_once("--record-memory-history needs a GPU: left out")
    if getattr(args, "gpu_sniff_test_interval", None):  # products of 8,192 by 8,192 numbers
        args.gpu_sniff_test_interval = None
        megatron_start.say_once("--gpu-sniff-test-interval needs a GPU: left out")
    if getattr(args, "use_sharp", False):  # gloo takes no devices, which it names
        args.use_sharp, args.sharp_enabled_group = False, None
        megatron_start.say_once("--use-sharp needs GPUs: left out")
    group_no_experts(args)


def group_no_experts(args) -> None:
    """Once more where a checkpoint has set what it was trained with (--use-checkpoint-args)."""
    grouped = getattr(args, "moe_grouped_gemm", False)
    if grouped and torch.cuda.get_device_capability() < (8, 0):  # as Megatron asks: a simulation's
        args.moe_grouped_gemm = False
        megatron_start.say_once("--moe-grouped-gemm needs a GPU: experts run one after the other")


def _patch_torch() -> None:
    cuda = torch.cuda
    cpu = torch.device("cpu")
    nothing = lambda *args, **kwargs: None  # noqa: E731
    zero = lambda *args, **kwargs: 0  # noqa: E731
    properties = types.SimpleNamespace(
        name="CPU", major=0, minor=0, total_memory=0, multi_processor_count=os.cpu_count()
    )
    replacements: dict[str, Any] = {
        "is_available": lambda: False,  # may ask device_count: PYTORCH_NVML_BASED_CUDA_CHECK
        "device_count": lambda: 1,
        "set_device": nothing,
        "current_device": lambda: cpu,
        "synchronize": nothing,
        "empty_cache": nothing,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "set_stream": nothing,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": lambda device=None: properties,
        "memory_allocated": zero,
        "memory_stats": lambda device=None: collections.defaultdict(int),
        "max_memory_allocated": zero,
        "memory_reserved": zero,
        "max_memory_reserved": zero,
        "reset_peak_memory_stats": nothing,
        "device_memory_used": zero,
        "is_current_stream_capturing": lambda: False,
    }
    for name, replacement in replacements.items():
        setattr(cuda, name, replacement)
    cuda.random.get_rng_state = replacements["get_rng_state"]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.type = _tensor_type(torch.Tensor.type)  # type: ignore[method-assign]
    for name in ("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "IntTensor"):
        setattr(cuda, name, getattr(torch, name))
    for name in ("LongTensor", "ByteTensor"):
        setattr(cuda, name, getattr(torch, name))
    distributed = torch.distributed
    distributed.all_to_all_single = _with_lists(distributed.all_to_all_single)
    distributed.all_gather = _gather_uneven(distributed.all_gather)
    distributed.reduce_scatter = _scatter_uneven(distributed.reduce_scatter)
    _CudaMeansCpu().__enter__()
    torch.autograd._engine_run_backward = _in_backwards(torch.autograd._engine_run_backward)


def _with_lists(all_to_all_single):
    """Takes numbers of rows as tensors too: Megatron's experts make arrays of a GPU's alone."""

    @functools.wraps(all_to_all_single)
    def with_lists(output, input, output_split_sizes=None, input_split_sizes=None, *args, **kwargs):
        splits = (
            sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
            for sizes in (output_split_sizes, input_split_sizes)
        )
        return all_to_all_single(output, input, *splits, *args, **kwargs)

    return with_lists


def _gather_uneven(all_gather):
    """Takes tensors of unlike numbers of rows too, which gloo refuses: the tokens of experts."""

    @functools.wraps(all_gather)
    def gather(tensor_list, tensor, *args, **kwargs):
        if len({x.shape for x in tensor_list}) == 1:
            return all_gather(tensor_list, tensor, *args, **kwargs)
        rows = max(len(x) for x in tensor_list)
        all_rows = [_padded(x, rows) for x in tensor_list]
        all_gather(all_rows, _padded(tensor, rows), *args, **kwargs)
        for into, x in zip(tensor_list, all_rows, strict=True):
            into.copy_(x[: len(into)])

    return gather


def _scatter_uneven(reduce_scatter):
    """As _gather_uneven, of a sum."""

    @functools.wraps(reduce_scatter)
    def scatter(output, input_list, *args, **kwargs):
        if len({x.shape for x in input_list}) == 1:
            return reduce_scatter(output, input_list, *args, **kwargs)
        rows = max(len(x) for x in input_list)
        all_rows = _padded(output, rows)
        reduce_scatter(all_rows, [_padded(x, rows) for x in input_list], *args, **kwargs)
        output.copy_(all_rows[: len(output)])

    return scatter


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: len(x)] = x
    return padded


def _in_backwards(run_backward):
    """Redirects in what a backward runs too, for which PyTorch leaves the mode."""

    @functools.wraps(run_backward)
    def run(*args, **kwargs):
        with _CudaMeansCpu():
            return run_backward(*args, **kwargs)

    return run


def _tensor_type(original):
    """Tensor.type() that reports and takes torch.cuda.FloatTensor where Megatron compares names."""

    @functools.wraps(original)
    def tensor_type(self, dtype=None, **kwargs):
        if dtype is None:
            name = original(self)  # under a TorchFunctionMode this comes back through tensor_type
            return name if name.startswith("torch.cuda.") else f"torch.cuda.{name[6:]}"
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, **kwargs)

    return tensor_type


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.random as parallel_random
    import megatron.training.initialize as initialize
    import megatron.training.training as training

    megatron_start.install()
    parallel_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: (
        torch.set_rng_state(state)
    )
    initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    initialize.initialize_megatron = initialize_megatron
    training.initialize_megatron = initialize_megatron
    training.set_jit_fusion_options = lambda tp_size=None: None  # no kernels to warm up
