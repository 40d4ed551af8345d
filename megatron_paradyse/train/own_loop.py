"""Plans for microbatches of a training loop that is not Megatron's (library.py).

It has a TransformerConfig, a GPTModel and Megatron's process groups, and no arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import operator
import os
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.core.utils import unwrap_model
from megatron.training import print_rank_0

from megatron_paradyse import prediction
from megatron_paradyse.errors import UserError, did_you_mean
from megatron_paradyse.hook import Counts, Planned, PolicyOf, attach_hooks
from megatron_paradyse.layer_specs import switchable_block
from megatron_paradyse.live_bytes import make_meter
from megatron_paradyse.model_edges import attach_edges, forget_lengths
from megatron_paradyse.policy import cost_policy_kind, make_policy
from megatron_paradyse.settings import FIELDS, Settings, make_settings
from megatron_paradyse.train import bucket_order
from megatron_paradyse.train.choosing import CostPolicies
from megatron_paradyse.train.megatron_limits import check_key_heads
from megatron_paradyse.train.model_arguments import arguments_of
from megatron_paradyse.train.model_flags import (
    check_edges,
    check_latent,
    check_model,
    check_prediction,
    complete_window,
)
from megatron_paradyse.train.read_parts import check_layers
from megatron_paradyse.train.static_bytes import static_bytes
from megatron_paradyse.train.strategy_flags import check_strategies

# Settings that plans and the loss head read; the others are of Megatron's loop and its data.
TAKEN = (
    *("policy", "strategies", "layers", "cost_model", "accept_costs", "granularity"),
    *("mixing_gain", "memory_budget", "host_memory", "memory_margin", "over_budget", "smoothing"),
    *("offload", "verify_plans", "head_tile"),
)
SIZES = {"memory_budget", "host_memory"}  # numbers of bytes, too
MOST_MICROBATCHES = 1 << 20  # where the loop does not say how many
MARK = "_paradyse_attached"  # of a GPTModel whose microbatches are planned


def switchable_spec(
    spec: ModuleSpec | TransformerBlockSubmodules | MultiTokenPredictionBlockSubmodules,
    config: TransformerConfig,
    *,
    vp_stage: int | None = None,
) -> Any:
    """Megatron's spec of layers, with attention and MLP that can switch their strategy.

    spec: of a GPT's layer or block, for GPTModel(transformer_layer_spec=...), or of multi-token
    prediction, for mtp_block_spec=...; config: the TransformerConfig. Parameters keep Megatron's
    names, shapes, shards and initialisation; layers of experts keep Megatron's MLP. UserError for
    layers of another type.
    """
    bucket_order.install()  # before a DistributedDataParallel is made
    _check_spec(spec, config)
    if isinstance(spec, MultiTokenPredictionBlockSubmodules):
        prediction.install()
        return prediction.switchable_prediction(spec, config)
    return switchable_block(spec, config, vp_stage)


def _check_spec(spec: Any, config: Any) -> None:
    """UserError for what Megatron ends at in words of its own code."""
    of_layers = isinstance(spec, TransformerBlockSubmodules | MultiTokenPredictionBlockSubmodules)
    if isinstance(spec, ModuleSpec) and isinstance(spec.module, type):
        of_layers = issubclass(spec.module, TransformerBlock | BaseTransformerLayer)
    if not of_layers:
        named = getattr(getattr(spec, "module", spec), "__name__", type(spec).__name__)
        raise UserError(
            f"switchable_spec({named}): give Megatron's spec of a layer or a block, such as "
            "get_gpt_layer_local_spec()"
        )
    if not isinstance(config, TransformerConfig):
        raise UserError(
            f"switchable_spec(..., {type(config).__name__}): give the model's TransformerConfig"
        )


class Attached:
    """What plans the microbatches of a model.

    iteration: set it as each begins, so that dropout is the same after a restart; microbatches then
    count anew. last: what was decided for the last microbatch with a backward, None before.
    """

    def __init__(self, chunks: list[GPTModel], policies: CostPolicies | None, *, seed: int):
        """policies: None where the policy does not choose by cost."""
        self._iteration = self._begun = 0
        self.last: Planned | None = None
        self._chunks, self._policies, self._seed = chunks, policies, seed

    @property
    def iteration(self) -> int:
        return self._iteration

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self._iteration = _whole("iteration", iteration)
        self._begun += 1

    def hold(self, optimizer: Any = None, *others: Any) -> None:
        """Plan with the memory that this rank holds now, outside the layers' activations.

        Until then plans reckon with what the cost file's grid held. optimizer, others: Megatron's
        or PyTorch's, all that train the model: gradients that the first backward will make and
        states that the first step will make count too. All ranks must call it, between iterations,
        and again whenever something else has moved into or out of the memory. UserError where no
        microbatch can run beside it, and for another's optimizer, whose states nothing tells.
        """
        optimizers = [one for one in (optimizer, *others) if one is not None]
        for one in optimizers:
            if not isinstance(one, MegatronOptimizer | torch.optim.Optimizer):
                raise UserError(
                    f"hold({type(one).__name__}): give Megatron's optimizer or PyTorch's, or none; "
                    "several as hold(first, second)"
                )
        if self._policies is not None:
            forget_lengths(self._chunks)
            meter = make_meter() if torch.cuda.is_available() else None
            self._policies.hold(static_bytes(self._chunks, optimizers, meter))

    def _counts(self) -> Counts:
        return Counts(self._seed, self._iteration, None, self._begun)

    # As an observer of hook.py

    def begins(self, planned: Planned, hidden: torch.Tensor) -> None:
        self.last = planned

    def forward_ends(self, output: torch.Tensor) -> None: ...


def attach(
    model_chunks: list,
    *,
    seed: int = 1234,
    num_microbatches: int | None = None,
    **settings: Any,
) -> Attached:
    """From now on every microbatch of these chunks runs the plan that the policy names for it.

    model_chunks: of this rank, GPTModels or what wraps or contains one; all ranks of the job must
    call it, once, when Megatron's process groups exist. seed: of attention dropout.
    num_microbatches: of an iteration, at most, for what stages of a pipeline hold at a time.
    settings: those of TAKEN, as a YAML file of settings has them. UserError for a model or settings
    that cannot run.
    """
    bucket_order.install()  # before a DistributedDataParallel is made
    if not mpu.model_parallel_is_initialized():
        raise UserError(
            "attach before Megatron's process groups exist: call mpu.initialize_model_parallel "
            "first"
        )
    found = _settings(settings)
    seed = _whole("seed", seed)
    if num_microbatches is not None and _whole("num_microbatches", num_microbatches) < 1:
        raise UserError(
            f"num_microbatches {num_microbatches!r}: give a whole number from 1, or none"
        )
    chunks = _chunks(model_chunks)
    args = arguments_of(chunks[0], found, num_microbatches=num_microbatches or MOST_MICROBATCHES)
    names = _checked(args)
    for chunk in chunks:
        chunk.config.window_size = args.window_size
        check_layers(chunk, names)
    policies, policy_of = _policies(args, chunks)
    attached = Attached(chunks, policies, seed=seed)
    attach_hooks(
        chunks,
        policy_of=policy_of,
        counts=attached._counts,
        observer=attached,
        verify=found.verify_plans,
    )
    attach_edges(chunks, head_tile=found.head_tile, positions_restart=True)
    for chunk in chunks:
        setattr(chunk, MARK, True)
    return attached


def _whole(name: str, given: Any) -> int:
    """UserError for another: texts of it, and of numpy's 1 and Python's, are hashed (hook.py)."""
    try:
        if isinstance(given, bool):
            raise TypeError
        return operator.index(given)
    except TypeError as error:
        raise UserError(f"{name} {given!r}: give a whole number") from error


def _policies(
    args: argparse.Namespace, chunks: list[GPTModel]
) -> tuple[CostPolicies | None, PolicyOf]:
    """Those that choose by cost, if they do, and which is a block's."""
    settings = args.paradyse_settings
    if cost_policy_kind(settings) is None:
        policy = make_policy(settings)
        return None, lambda block: policy
    policies = CostPolicies(settings, args)
    print_rank_0(policies.describe())
    return policies, lambda block: policies.policy_of(block, chunks)


def _as_written(value: Any) -> Any:
    """A setting as a YAML file has it: programs also have paths and tuples."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _as_written(one) for key, one in value.items()}
    return list(map(_as_written, value)) if isinstance(value, tuple | list) else value


def _settings(given: dict[str, Any]) -> Settings:
    for name in given:
        if name not in FIELDS:
            near = did_you_mean(name, TAKEN)
            raise UserError(f"unknown setting {name!r}: {near}known are {', '.join(TAKEN)}")
        if name not in TAKEN:
            raise UserError(
                f"{name} in a loop of your own, which it does not reach: leave it out; known are "
                f"{', '.join(TAKEN)}"
            )
    written = {name: _as_written(value) for name, value in given.items()}
    for name in SIZES & written.keys():
        size = written[name]  # 0.9 * torch.cuda.mem_get_info()[1], too
        is_number = isinstance(size, Real) and not isinstance(size, bool)
        if is_number and not 1 <= size < math.inf:
            raise UserError(f"{name} {size}: give bytes, from 1, or a text such as 76GiB")
        written[name] = f"{math.floor(size)}B" if is_number else size
    settings = make_settings(written, None, prefix="")
    if cost_policy_kind(settings) is None:
        if settings.memory_budget is not None:
            raise UserError(
                f"memory_budget {settings.memory_budget} with policy {settings.policy}, which does "
                "not choose by cost: leave it out"
            )
        return settings
    if settings.cost_model is None:
        raise UserError(
            f"the policy {settings.policy} without cost_model: make a file with megatron-paradyse "
            "profile and fit, with Megatron's flags for this model, and give it"
        )
    return dataclasses.replace(settings, correction=False)  # the loop's times are not measured


def _chunks(given: Any) -> list[GPTModel]:
    """The GPTModels of them; UserError where they are no list of some that nothing plans yet."""
    if isinstance(given, torch.nn.Module) and not isinstance(given, torch.nn.ModuleList):
        raise UserError(f"model_chunks is a {type(given).__name__}: give a list of it, [model]")
    others = [one for one in given or () if not isinstance(one, torch.nn.Module)]
    if given is None or others:
        kind = type(others[0] if others else given).__name__
        raise UserError(f"model_chunks has a {kind}: give a list of models, [model]")
    chunks = [_gpt(chunk) for chunk in given]
    if not chunks:
        raise UserError("model_chunks is empty: give this rank's, of a model in one piece [model]")
    if any(getattr(chunk, MARK, False) for chunk in chunks):
        raise UserError(
            "a chunk was attached to before, and one plan would replace the other's: attach once"
        )
    due = chunks[0].config.virtual_pipeline_model_parallel_size or 1
    if len({id(chunk) for chunk in chunks}) != len(chunks) or len(chunks) != due:
        raise UserError(
            f"model_chunks has {len(chunks)}, and its model is of {due} on this rank "
            "(virtual_pipeline_model_parallel_size): give each of them once, and attach to every "
            "model by a call of its own"
        )
    return chunks


def _gpt(chunk: Any) -> GPTModel:
    chunk = unwrap_model(chunk)
    found = [module for module in chunk.modules() if isinstance(module, GPTModel)]
    if len(found) != 1:
        raise UserError(
            f"{type(chunk).__name__} has {len(found)} GPTModels, and one is attached to: give "
            "chunks that are one or contain one"
        )
    return found[0]


def _checked(args: argparse.Namespace) -> tuple[str, ...]:
    """Every strategy that the policy may choose; UserError as of a training by these flags."""
    try:
        check_model(args)
        complete_window(args)
        check_key_heads(args)
        check_latent(args)
        check_prediction(args)
        check_edges(args)
        return check_strategies(args)
    except UserError as error:
        raise UserError(f"of this model, in Megatron's flags: {error}") from error
