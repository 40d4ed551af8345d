"""Before each forward pass: ask the policy, and hand its plan to the layers with the microbatch.

The plan travels to the layers as Megatron's packed_seq_params argument (microbatch_params.py).
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.parallel_state import get_data_parallel_rank, get_global_memory_buffer
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_paradyse.attention_masks import check_of_generation, documents_of_mask
from megatron_paradyse.core_attention import CoreAttention
from megatron_paradyse.errors import UserError
from megatron_paradyse.microbatch_params import PlannedMicrobatch, planned_microbatch, row_of
from megatron_paradyse.packing.row import Row
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.plan import Plan
from megatron_paradyse.strategies import check_takes, check_takes_wide
from megatron_paradyse.strategies.contract import Microbatch

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_paradyse.policy import Policy


@dataclass(frozen=True)
class Planned:
    """What the hook decided for a microbatch, and what the policy predicts if it can.

    seconds and peak_bytes: of the layers of this stage, forward and backward. row: of packed
    documents. policy: which decided.
    """

    iteration: int
    microbatch: int
    batch_size: int
    seq_length: int
    plan: Plan
    planner_seconds: float
    seconds: float | None = None
    peak_bytes: int | None = None
    row: Row | None = None
    policy: Policy | None = None


class Counts(NamedTuple):
    """Where training is: what makes a microbatch's random numbers its own, after a restart too.

    iteration: from 0. num_microbatches: after how many the count begins again within an iteration;
    None: only with another iteration. begun: another number where one begins, be it the same again.
    """

    seed: int
    iteration: int
    num_microbatches: int | None
    begun: int = 0


class Observer(Protocol):
    """Sees the microbatches of training at one transformer block."""

    def begins(self, planned: Planned, hidden: Tensor) -> None:
        """Before the block's forward on hidden [s/p, b, h]."""
        ...

    def forward_ends(self, output: Tensor) -> None:
        """After it, with its output [s/p, b, h], or that of the multi-token prediction after it."""
        ...


class MicrobatchHook:
    """Forward pre-hook of a TransformerBlock, for its layers and those of a prediction after it."""

    def __init__(
        self,
        block: TransformerBlock,
        policy: Policy,
        *,
        layers: list,
        predicts: bool,
        counts: Callable[[], Counts],
        observer: Observer | None,
        verify: bool,
    ):
        """layers: of both, in the order in which they run; predicts: whether a second is there."""
        self._policy, self._observer, self._verify = policy, observer, verify
        self._counts = counts
        self._arguments = tuple(inspect.signature(block.forward).parameters)
        self._outcome = getattr(policy, "outcome", None)  # of a policy that chooses by cost
        self._draws = getattr(policy, "draws", False)  # of one that chooses at random
        self._layer_numbers = tuple(layer.plan_number for layer in layers)
        self._shards = block.tp_group.size() if block.config.sequence_parallel else 1
        self._iteration, self._begun, self._microbatch = -1, 0, -1
        self._causal = layers[0].self_attention.attn_mask_type == AttnMaskType.causal
        self._own_core = isinstance(layers[0].self_attention.core_attention, CoreAttention)
        self._predicts = predicts
        self._for_prediction: PlannedMicrobatch | None = None

    def __call__(self, block: TransformerBlock, args, kwargs):
        args, kwargs = (), {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        if kwargs.get("inference_context") is not None or InferenceMode.is_active():
            if self._own_core:
                check_of_generation(kwargs.get("attention_mask"), kwargs.get("packed_seq_params"))
            return args, kwargs  # keys of earlier tokens, which Megatron's own forward knows
        _refuse_second_dropout(block)
        hidden = kwargs["hidden_states"] if block.pre_process else block.input_tensor
        rows, batch_size = hidden.shape[0], hidden.shape[1]  # [s/p, b, h]
        original, seq_length = kwargs.get("packed_seq_params"), rows * self._shards
        row = row_of(original, seq_length=seq_length, batch_size=batch_size, p=self._shards)
        seed = self._next_seed(1 if row is None else row.groups)
        planned = self._decide(batch_size, seq_length, row)
        if self._verify:
            wide = getattr(original, "wide", None)
            _verify(planned, wide.ranks if wide else block.tp_group, hidden.device)
        if self._outcome is not None:
            _drop_other_buffers(seq_length * hidden[0].numel())
        padded = None
        if row is None:
            mask = kwargs.get("attention_mask")
            padded = documents_of_mask(mask, batch_size=batch_size, causal=self._causal)
        current = planned_microbatch(original, row, padded, plan=planned.plan, seed=seed)
        kwargs["packed_seq_params"] = current
        if self._predicts:
            self._for_prediction = current
        if self._observer is not None and torch.is_grad_enabled():
            self._observer.begins(planned, hidden)
        return args, kwargs

    def before_prediction(self, prediction: MultiTokenPredictionBlock, args, kwargs):
        """Forward pre-hook of the prediction that follows the block."""
        kwargs["packed_seq_params"], self._for_prediction = self._for_prediction, None
        return args, kwargs

    def after(self, block: TransformerBlock | MultiTokenPredictionBlock, args, output) -> None:
        """Forward hook of what runs last."""
        if self._observer is not None and torch.is_grad_enabled():
            self._observer.forward_ends(output)

    def _decide(self, batch_size: int, seq_length: int, row: Row | None) -> Planned:
        shape = (batch_size, seq_length, self._layer_numbers)
        how: dict = {"forward_only": not torch.is_grad_enabled()}
        if row is not None:  # a policy that is never asked about rows need not know of them
            how["row"] = row
        if self._draws:
            how["at"] = (self._iteration, self._microbatch)
        start = time.perf_counter()
        seconds, peak_bytes = None, None
        if self._outcome is not None:
            outcome = self._outcome(*shape, **how)
            plan, seconds, peak_bytes = outcome.plan, outcome.seconds, outcome.peak_bytes
        else:
            plan = self._policy.plan(*shape, **how)
        spent = time.perf_counter() - start
        self._check_taken(plan, batch_size, seq_length, row)
        return Planned(
            self._iteration,
            self._microbatch,
            batch_size,
            seq_length,
            plan,
            spent,
            seconds,
            peak_bytes,
            row,
            self._policy,
        )

    def _check_taken(self, plan: Plan, batch_size: int, seq_length: int, row: Row | None) -> None:
        """UserError if the plan names a strategy that cannot run this microbatch."""
        microbatch = microbatch_of(row) if row else Microbatch(seq_length, batch_size)
        choices = set(plan.layers.values())
        if row is not None and row.groups > 1:
            for name in sorted({one.attention for one in choices}):
                check_takes_wide(name, row.groups)
            return
        for name in sorted({name for one in choices for name in (one.attention, one.mlp)}):
            check_takes(name, microbatch, self._shards)

    def _next_seed(self, groups: int) -> int:
        """A hash of the run's seed, the iteration, the microbatch and the replicas that have it."""
        seed, iteration, num_microbatches, begun = self._counts()
        if (iteration, begun) != (self._iteration, self._begun):
            self._iteration, self._begun, self._microbatch = iteration, begun, -1
        self._microbatch += 1
        if num_microbatches is not None:
            self._microbatch %= num_microbatches
        counters = (seed, iteration, self._microbatch, get_data_parallel_rank() // groups)
        return int.from_bytes(hashlib.sha256(repr(counters).encode()).digest()[:4])


def _refuse_second_dropout(block: TransformerBlock) -> None:
    """UserError where a checkpoint around the model runs it again and would drop other scores.

    Such a run counts as a microbatch of its own: nothing tells of which it is the second.
    """
    dropout = block.config.attention_dropout
    if dropout and block.training and torch._C._current_graph_task_id() != -1:
        raise UserError(
            f"a checkpoint around the model runs it again in a backward, with attention_dropout "
            f"{dropout}, which would then drop other scores than in the forward: leave it to plans "
            "with +recompute to recompute, or drop nothing"
        )


def _drop_other_buffers(num_elements: int) -> None:
    """Let go of the buffers that Megatron grew to gather microbatches of other lengths.

    They hold nothing between operations, and would otherwise stay as large as the longest
    microbatch of the whole training: a plan is made for what this one needs.
    """
    buffers = get_global_memory_buffer().buffer
    for key in [key for key, tensor in buffers.items() if tensor.numel() != num_elements]:
        del buffers[key]


def _verify(planned: Planned, group, device) -> None:
    """UserError on every rank unless all ranks of the group have the same plan."""
    digest = hashlib.sha256(planned.plan.runs().encode()).digest()[:7]
    mine = torch.tensor([int.from_bytes(digest)], device=device)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(gathered, mine, group=group)
    others = [rank for rank, other in enumerate(gathered) if int(other) != int(mine)]
    if others:
        raise UserError(
            f"plans differ at iteration {planned.iteration}, s={planned.seq_length}: rank "
            f"{group.rank()} of those that have it runs {planned.plan.runs()}, ranks "
            f"{others} another plan: give all ranks the same flags, cost file and code"
        )


PolicyOf = Callable[[TransformerBlock], "Policy"]


def attach_hooks(
    model_chunks: list,
    *,
    policy_of: PolicyOf,
    counts: Callable[[], Counts],
    observer: Observer | None = None,
    verify: bool = False,
) -> list:
    """Register the hook on every transformer block of every model chunk; returns the chunks.

    counts: asked before each microbatch.
    """
    for chunk in model_chunks:
        for block in _of_kind(chunk, TransformerBlock):
            policy = policy_of(block)
            prediction = next(iter(_of_kind(chunk, MultiTokenPredictionBlock)), None)
            layers = [*block.layers]
            for place, layer in enumerate(layers):
                layer.megatron_recomputes = _recomputed_by_megatron(block.config, place)
            for following in prediction.layers if prediction is not None else ():
                layer = following.mtp_model_layer
                layer.megatron_recomputes = _recomputed_by_megatron(block.config, inf)
                layers.append(layer)
            if not layers:
                continue  # a pipeline stage of an embedding or a loss alone
            predicts = prediction is not None
            hook = MicrobatchHook(
                block,
                policy,
                layers=layers,
                predicts=predicts,
                counts=counts,
                observer=observer,
                verify=verify,
            )
            block.register_forward_pre_hook(hook, with_kwargs=True)
            if prediction is not None:
                prediction.register_forward_pre_hook(hook.before_prediction, with_kwargs=True)
            (prediction or block).register_forward_hook(hook.after)
    return model_chunks


def _of_kind(chunk, kind: type) -> list:
    return [module for module in chunk.modules() if isinstance(module, kind)]


def _recomputed_by_megatron(config, place: float) -> bool:
    """Whether --recompute-granularity full takes the layer at this place of its block.

    Those of multi-token prediction are beyond every place that a block's number of layers reaches.
    """
    if config.recompute_granularity != "full":
        return False
    return config.recompute_method != "block" or place < config.recompute_num_layers
