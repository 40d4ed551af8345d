"""What a rank holds all through its training: parameters, gradients, states of the optimizer.

A cost file tells those of the grid that was profiled. How many replicas share the optimizer's
states, and which pipeline stage holds what, is the run's own: so training counts them itself.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.utils import get_model_config, unwrap_model

from megatron_paradyse.live_bytes import Meter


def static_bytes(chunks: list, optimizer: Any, meter: Meter | None, *, trains: bool = True) -> int:
    """Of this rank, once model and optimizer are made.

    optimizer: Megatron's or PyTorch's, a list of such, None if none is made. meter: None where
    nothing counts what else is alive. trains: whether backwards are to come.
    """
    gc.collect()
    parameters = _parameters(chunks, optimizer)
    held = _referred_bytes(chunks, optimizer, parameters) if meter is None else meter.live_bytes
    to_come = _states_to_come(optimizer) + (_gradients_to_come(parameters) if trains else 0)
    return held + to_come + sum(map(waiting_gradient_bytes, chunks))


def _parameters(chunks: list, optimizer: Any) -> list[torch.nn.Parameter]:
    """Those that a backward may make gradients for.

    PyTorch's optimizer also has those of a module around a chunk or beside it.
    """
    found = [parameter for chunk in chunks for parameter in chunk.parameters()]
    for made, config in _optimizers(optimizer):
        if config is None:  # Megatron's have copies of them
            found += [parameter for group in made.param_groups for parameter in group["params"]]
    return list({id(parameter): parameter for parameter in found}.values())


def _referred_bytes(chunks: list, optimizer: Any, parameters: list[torch.nn.Parameter]) -> int:
    """Of the tensors that modules and optimizer refer to."""
    tensors: list[Any] = [*parameters]
    for parameter in parameters:
        tensors += [parameter.grad, getattr(parameter, "main_grad", None)]
    for chunk in chunks:
        tensors += chunk.buffers()
    for made, _ in _optimizers(optimizer):
        tensors += [parameter for group in made.param_groups for parameter in group["params"]]
        tensors += [value for state in made.state.values() for value in state.values()]
    storages = [x.untyped_storage() for x in tensors if isinstance(x, torch.Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def largest_by_stage(own_bytes: int) -> list[int]:
    """The most that any rank of each pipeline stage holds. All ranks of the job must call it."""
    stages = mpu.get_pipeline_model_parallel_world_size()
    held = torch.zeros(stages, dtype=torch.int64, device=torch.cuda.current_device())
    held[mpu.get_pipeline_model_parallel_rank()] = own_bytes
    torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MAX)
    return held.tolist()


def waiting_gradient_bytes(chunk: Any) -> int:
    """What the output layer's gradient takes while it waits for that of the tied embedding.

    Nothing where they are frozen.
    """
    model = unwrap_model(chunk)
    if not (model.share_embeddings_and_output_weights and model.pre_process and model.post_process):
        return 0
    if get_model_config(chunk).gradient_accumulation_fusion:  # then it goes into main_grad at once
        return 0
    weight = model.shared_embedding_or_output_weight()
    return weight.nbytes if weight.requires_grad else 0


def _gradients_to_come(parameters: list[torch.nn.Parameter]) -> int:
    """Bytes of those that a backward makes: of parameters that no DDP has a buffer for."""
    return sum(
        parameter.nbytes
        for parameter in parameters
        if parameter.requires_grad
        and parameter.grad is None
        and getattr(parameter, "main_grad", None) is None
    )


def _states_to_come(optimizer: Any) -> int:
    """Bytes on this device of the states that the optimizer makes in its first step.

    None where a checkpoint brought them.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return sum(
        _state_bytes(made, group, config, parameter)
        for made, config in _optimizers(optimizer)
        for group in made.param_groups
        for parameter in group["params"]
        if parameter.device.type == device and not made.state.get(parameter)
    )


def _optimizers(optimizer: Any) -> Iterator[tuple[torch.optim.Optimizer, Any]]:
    """PyTorch's optimizers within Megatron's, and their configuration; None of one without."""
    if optimizer is None:
        return
    if isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer, None
        return
    if isinstance(optimizer, list):
        for one in optimizer:
            yield from _optimizers(one)
        return
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        made = getattr(one, "optimizer", None)
        for part in getattr(made, "sub_optimizers", [made]):  # of --optimizer-cpu-offload
            if part is not None:
                yield part, one.config


def _state_bytes(
    made: torch.optim.Optimizer, group: dict, config: Any, parameter: torch.Tensor
) -> int:
    """Of a parameter."""
    if config is None:
        return parameter.itemsize * _numbers_of_pytorchs(made, group, parameter)
    if "Adam" not in type(made).__name__:
        return 4 * parameter.numel() * _has_momentum(group)
    total = config.exp_avg_dtype.itemsize + config.exp_avg_sq_dtype.itemsize
    if config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:  # FusedAdam's own main parameters
        total += 2 if config.store_param_remainders else config.main_params_dtype.itemsize
    return total * parameter.numel()


def _numbers_of_pytorchs(made: torch.optim.Optimizer, group: dict, parameter: torch.Tensor) -> int:
    """Of a parameter's dtype, that PyTorch's optimizer keeps of it."""
    if not parameter.requires_grad:
        return 0  # a step passes over it; Megatron's groups have no such parameter of the model
    shape = parameter.shape
    if isinstance(made, torch.optim.Adafactor) and len(shape) > 1:
        return math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]
    each = _has_momentum(group)  # SGD's, Muon's and Lion's, and what others have as one
    if isinstance(made, torch.optim.RMSprop):
        each += 1 + group["centered"]
    elif isinstance(made, torch.optim.Adadelta | torch.optim.Rprop):
        each = 2
    elif "Adam" in type(made).__name__:
        each = 3 if group.get("amsgrad") else 2
    return each * parameter.numel()


def _has_momentum(group: dict) -> int:
    return int(bool(group.get("momentum", 1)))
