"""The model that is profiled: one or two layers of the user's, built as training builds it.

A layer's share of what grows with the layers (static bytes, the optimizer) is the difference
between two layers and one, so that a model of any depth is profiled in the memory of two layers.
Where layers differ, each kind has such a share, and the profiled model has one layer of each.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training import get_args, training
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from megatron_paradyse.costs.layers import MLP, half_of, layer_of
from megatron_paradyse.costs.table import Constants
from megatron_paradyse.hook import attach_hooks
from megatron_paradyse.live_bytes import Meter
from megatron_paradyse.model_edges import attach_edges
from megatron_paradyse.plan import Plan, uniform_plan
from megatron_paradyse.submodules import SwitchableMLP
from megatron_paradyse.train.loop_counts import loop_counts
from megatron_paradyse.train.model_kind import model_config
from megatron_paradyse.train.model_layers import ModelLayers
from megatron_paradyse.train.static_bytes import waiting_gradient_bytes

OPTIMIZER_STEPS = 7


class GivenPolicy:
    """Answers with the plan it was given last."""

    def __init__(self) -> None:
        self.chosen: Plan | None = None
        self.strategies: tuple[str, ...] = ()

    def plan(self, batch_size: int, seq_length: int, layer_numbers, **_: object) -> Plan:
        return self.chosen or uniform_plan(tuple(layer_numbers), "megatron_ts")


@dataclass(frozen=True)
class ProfiledModel:
    """A model in Megatron's wrappers, its optimizer, and the policy of its hook."""

    chunks: list
    optimizer: Any
    scheduler: Any
    policy: GivenPolicy
    layers: ModelLayers

    @property
    def gpt(self):
        return unwrap_model(self.chunks[0])

    @property
    def layer(self):
        """The first."""
        return self.gpt.decoder.layers[0]

    def layer_of(self, operation: str):
        """The layer whose half or whole has that name, see costs/layers.py."""
        return self.gpt.decoder.layers[self.layers.numbers.index(layer_of(operation))]

    def switches(self, operation: str) -> bool:
        """Whether what it runs depends on the strategy: an MLP of experts stays Megatron's."""
        return half_of(operation) != MLP or isinstance(self.layer_of(operation).mlp, SwitchableMLP)

    @property
    def config(self):
        return get_model_config(self.chunks[0])


def build_model(num_layers: int) -> ProfiledModel:
    """Of the first layers that the arguments describe, which name so many afterwards."""
    return build_layers(ModelLayers.of_arguments(get_args(), num_layers))


def build_layers(layers: ModelLayers) -> ProfiledModel:
    """Build through Megatron's own setup; afterwards the arguments are of these layers alone."""
    container, policy = model_configuration(layers)
    chunks, optimizer, scheduler = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        cfg_container=container,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    get_model_config(chunks[0]).finalize_model_grads_func = finalize_model_grads
    for chunk in chunks:
        chunk.train()
    return ProfiledModel(chunks, optimizer, scheduler, policy, layers)


def model_configuration(layers: ModelLayers) -> tuple[Any, GivenPolicy]:
    """Megatron's configuration of the model, with the hooks of training, and the policy they ask.

    Afterwards the arguments are of these layers alone, and nothing overlaps the layers: Megatron
    counts the gradients of whole backwards to begin their reduction, and here halves run alone.
    """
    args = get_args()
    layers.put_into(args)
    args.overlap_grad_reduce = args.overlap_param_gather = False
    args.overlap_param_gather_with_optimizer_step = False
    policy = GivenPolicy()
    container = pretrain_cfg_container_from_args(args, model_config(args))
    container.model.pre_wrap_hooks += [
        functools.partial(attach_hooks, policy_of=lambda _: policy, counts=loop_counts),
        functools.partial(attach_edges, head_tile=args.paradyse_settings.head_tile),
    ]
    return container, policy


def build_and_measure(
    num_layers: int, meter: Meter, *, longest_tokens: int
) -> tuple[ProfiledModel, Constants]:
    """A model with a layer of each kind, and the constants of one with num_layers.

    longest_tokens: s b of the longest microbatch, of the gather buffer. All ranks must call it. The
    constants are the largest of any rank's.
    """
    with meter:
        before = meter.live_bytes
        _multiply_once()
        workspace_bytes = meter.live_bytes - before
    layers = ModelLayers.of_arguments(get_args(), num_layers)
    kinds = layers.kinds()
    chosen = tuple(kinds.first_layers.values())
    model, one = _built(layers.only(chosen[:1]), meter)
    constants, shares = [*one], {}
    for number, (kind, count) in zip(chosen, kinds.counts().items(), strict=True):
        more = count - 1 if number == chosen[0] else count  # than the one layer that is there
        if more:  # so it is with any kind that multi-token prediction has
            del model
            gc.collect()
            model, two = _built(layers.only((chosen[0], number)), meter)
            shares[kind] = [max(0.0, b - a) for a, b in zip(one, two, strict=True)]
            constants = [a + more * s for a, s in zip(constants, shares[kind], strict=True)]
    if layers.num_predicting:  # what that has besides its layers
        del model
        gc.collect()
        model, whole = _built(layers.only(chosen[:1], predicting=True), meter)
        others = [shares[kinds.operations(n)] for n in model.layers.numbers[1:]]
        expected = [sum(values) for values in zip(one, *others, strict=True)]
        constants = [
            a + max(0.0, w - e) for a, w, e in zip(constants, whole, expected, strict=True)
        ]
    profiled = layers.only(chosen, predicting=True)
    if model.layers not in (profiled, layers.only(chosen * 2)):
        del model
        gc.collect()
        model, _ = _built(profiled, meter)
    with meter:
        before = meter.live_bytes
        grow_gather_buffer(model, longest_tokens)
        waiting = waiting_gradient_bytes(model.chunks[0])
        constants[0] += meter.live_bytes - before + waiting + workspace_bytes
    static_bytes, seconds, peak = largest_over_ranks(constants)
    return model, Constants(
        static_bytes, seconds, peak, buffer_tokens=longest_tokens, waiting_bytes=waiting
    )


def _multiply_once() -> None:
    """On a GPU the first product of each direction leaves a workspace of cuBLAS behind."""
    x = torch.ones(64, 64, device=torch.cuda.current_device(), requires_grad=True)
    (x @ x).sum().backward()


def build_under(meter: Meter, layers: ModelLayers) -> tuple[ProfiledModel, int, int]:
    """A model with its optimizer's states; the live bytes before it, and its own."""
    with meter:
        before = meter.live_bytes
        model = build_layers(layers)
        step_without_microbatches(model)  # makes the optimizer's states
        gc.collect()
        return model, before, meter.live_bytes - before


def _built(layers: ModelLayers, meter: Meter) -> tuple[ProfiledModel, tuple[float, float, float]]:
    """A model, and as if it were the whole: static_bytes, optimizer_seconds, optimizer_bytes."""
    model, before, static_bytes = build_under(meter, layers)
    with meter:
        meter.reset_peak()
        step_without_microbatches(model)
        optimizer_bytes = meter.peak_bytes - before - static_bytes
    seconds = []
    for _ in range(OPTIMIZER_STEPS):
        torch.distributed.barrier()
        start = time.perf_counter()
        step_without_microbatches(model)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return model, (static_bytes, statistics.median(seconds), optimizer_bytes)


def grow_gather_buffer(model: ProfiledModel, tokens: int) -> None:
    """Make the buffer into which Megatron's linears gather [s, b, h], kept from then on."""
    if not model.config.sequence_parallel or mpu.get_tensor_model_parallel_world_size() == 1:
        return
    shape = [tokens, model.config.hidden_size]
    get_global_memory_buffer().get_tensor(shape, get_args().params_dtype, "mpu")


def step_without_microbatches(model: ProfiledModel) -> None:
    """All that Megatron's train_step does around the forward and backward of microbatches."""
    training.train_step(
        None,
        RerunDataIterator(iter([])),
        model.chunks,
        model.optimizer,
        model.scheduler,
        model.config,
        functools.partial(_only_finalize, model.config),
        iteration=0,
    )


def _only_finalize(config, **arguments) -> list[dict]:
    one = torch.ones((), dtype=torch.int, device=torch.cuda.current_device())
    tokens = one if config.calculate_per_token_loss else None
    config.finalize_model_grads_func(arguments["model"], tokens)
    return [{"lm loss": torch.ones(2, device=one.device)}]


def largest_over_ranks(values: Sequence[float]) -> list[float]:
    """The largest of each value over all ranks: experts may lie over several replicas."""
    device = torch.cuda.current_device()
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return tensor.tolist()
