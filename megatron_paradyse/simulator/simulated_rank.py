"""One rank of a grid in this process: Megatron's own layers over tensors that have no values.

The layers are built as a profile builds them. Fake tensors have shapes, dtypes and storages of the
right size, and a group that moves nothing has any size; so bytes are those of the real layers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.utils import unwrap_model
from megatron.training import get_args, training
from megatron.training.arguments import parse_and_validate_args
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from megatron_paradyse.costs.layers import LayerKinds
from megatron_paradyse.doors import opened
from megatron_paradyse.edges import cross_entropy
from megatron_paradyse.profiler.model import ProfiledModel, model_configuration
from megatron_paradyse.simulator.flash_kernel import LEAST
from megatron_paradyse.simulator.traffic import Place
from megatron_paradyse.strategies import aligned_heads
from megatron_paradyse.train.batch import derive_batch, derive_masked_batch
from megatron_paradyse.train.model_kind import BERT
from megatron_paradyse.train.model_layers import ModelLayers


def start_megatron(flags: Sequence[str], *, world: int, rank: int) -> None:
    """Megatron's arguments and groups, as rank `rank` of so many; once in a process."""
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # no one is asked there
    sys.argv = ["simulate", *flags]
    with opened([(torch.cuda, "get_device_capability", lambda device=None: LEAST)]):
        parse_and_validate_args()
    training.initialize_megatron()
    get_args().check_for_nan_in_loss_and_grad = False  # that check wants a value


def build_layers(layers: ModelLayers) -> ProfiledModel:
    """A model of these layers in Megatron's wrappers, without an optimizer."""
    container, policy = model_configuration(layers)
    with _parameters_of_dtype(get_args().params_dtype):
        builder = container.model.get_builder_cls()(container.model)
        chunks = builder.build_distributed_models(
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            ddp_config=container.ddp,
            overlap_param_gather_with_optimizer_step=False,
            use_megatron_fsdp=False,
            use_torch_fsdp2=False,
            wrap_with_ddp=True,
            data_parallel_random_init=False,
        )
    for chunk in chunks:
        chunk.train()
    return ProfiledModel(chunks, None, None, policy, layers)


@contextlib.contextmanager
def _parameters_of_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters are made in their dtype; fake ones cannot be converted in place afterwards."""
    default = torch.get_default_dtype()
    conversions = [(torch.nn.Module, name, lambda module: module) for name in ("bfloat16", "half")]
    with opened(conversions):
        try:
            torch.set_default_dtype(dtype)
            yield
        finally:
            torch.set_default_dtype(default)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Tensors made inside are fake, and nobody asks for the state of random numbers.

    What needs values, which rows METP's whole heads have, is computed beside them. The gradient of
    the losses is taken to be a multiple of the loss mask, as it is in training.
    """
    plan, common_factor = aligned_heads._plan, cross_entropy._common_factor

    @functools.cache
    def plan_with_values(*arguments):
        with _disable_current_modes():
            return plan.__wrapped__(*arguments)

    def factor_without_values(grad, token_weights):
        try:
            return common_factor(grad, token_weights)  # allocates what it does, and then asks
        except DataDependentOutputException:
            return 1.0

    doors = [
        (cross_entropy, "_common_factor", factor_without_values),
        (CudaRNGStatesTracker, "fork", lambda self, *name: contextlib.nullcontext()),
        (aligned_heads, "_plan", plan_with_values),
    ]
    with opened(doors), FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextlib.contextmanager
def attention_as_rank(model: ProfiledModel, rank: int) -> Iterator[None]:
    """Strategies of the layers' attention take themselves for that rank."""
    attentions = [layer.self_attention for layer in model.gpt.decoder.layers]
    groups = [attention.pg_collection for attention in attentions]
    try:
        for attention in attentions:
            attention.pg_collection = copy.copy(attention.pg_collection)
            attention.pg_collection.tp = Place(rank, attention.pg_collection.tp.size())
        yield
    finally:
        for attention, before in zip(attentions, groups, strict=True):
            attention.pg_collection = before


def read_anywhere(raw: Iterator[dict]) -> dict:
    """The microbatch as a rank has it that got it from the first one."""
    tokens = next(raw)["tokens"]
    b, s = tokens.shape[0], tokens.shape[1] - 1
    masked = get_args().paradyse_model == BERT
    size = (b, 1 + (2 * s if masked else s + 1))
    payload = torch.zeros(size, dtype=torch.int64, device=torch.cuda.current_device())
    lengths = payload[:, 0]
    last = get_args().max_position_embeddings - 1
    if masked:
        return derive_masked_batch(payload[:, 1:], None, max_position=last)
    return derive_batch(payload[:, 1:], lengths, max_position=last)


def static_numbers(model: ProfiledModel, kinds: LayerKinds) -> int:
    """Parameters that this rank holds of the whole model, of which this one has all kinds."""
    everything = _count(unwrap_model(model.chunks[0]))
    built = Counter(map(kinds.operations, model.layers.numbers))
    for kind, count in kinds.counts().items():
        layer = model.gpt.decoder.layers[model.layers.numbers.index(kinds.first_layers[kind])]
        everything += (count - built[kind]) * _count(layer)
    return everything


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
