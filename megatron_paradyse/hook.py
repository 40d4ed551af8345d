"""Before each forward pass: ask the policy, and hand its plan to the layers with the microbatch.

The plan travels to the layers as Megatron's packed_seq_params argument. Megatron's activation
recomputation closes over that argument, so a layer that runs again in the backward sees the plan
of its own microbatch, whatever has been planned since.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_data_parallel_rank
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training import get_args

from megatron_paradyse.plan import Plan

if TYPE_CHECKING:
    from megatron_paradyse.policy import Policy


@dataclass
class PlannedMicrobatch(PackedSeqParams):
    """Megatron's packed-sequence parameters of a microbatch, and its plan.

    original is what Megatron passed: None for unpacked sequences. seed differs between
    microbatches and between data-parallel replicas, and is the same after a restart.
    """

    plan: Plan = field(default_factory=lambda: Plan({}))
    original: PackedSeqParams | None = None
    seed: int = 0

    def __post_init__(self):
        pass  # seq_idx was computed when the original was made

    def dropout_seed(self, layer_number: int) -> int:
        """The seed of a layer's attention dropout, alike on every rank of the group."""
        return self.seed * 4096 + layer_number


class MicrobatchHook:
    """Forward pre-hook of one TransformerBlock."""

    def __init__(self, block: TransformerBlock, policy: Policy):
        self._policy = policy
        self._layer_numbers = tuple(layer.layer_number for layer in block.layers)
        self._shards = block.tp_group.size() if block.config.sequence_parallel else 1
        self._iteration, self._microbatch = -1, -1

    def __call__(self, block: TransformerBlock, args, kwargs):
        hidden = kwargs["hidden_states"] if block.pre_process else block.input_tensor
        rows, batch_size = hidden.shape[0], hidden.shape[1]  # [s/p, b, h]
        plan = self._policy.plan(batch_size, rows * self._shards, self._layer_numbers)
        original = kwargs.get("packed_seq_params")
        fields = {} if original is None else _fields(original)
        kwargs["packed_seq_params"] = PlannedMicrobatch(
            **fields, plan=plan, original=original, seed=self._next_seed()
        )
        return args, kwargs

    def _next_seed(self) -> int:
        """A hash of the run's seed, the iteration, the microbatch and the replica.

        Megatron may run an iteration again to validate it: the microbatches then count anew.
        """
        args = get_args()
        iteration = getattr(args, "curr_iteration", 0) or 0
        if iteration != self._iteration:
            self._iteration, self._microbatch = iteration, -1
        self._microbatch = (self._microbatch + 1) % get_num_microbatches()
        counters = (args.seed, iteration, self._microbatch, get_data_parallel_rank())
        return int.from_bytes(hashlib.sha256(repr(counters).encode()).digest()[:4])


def _fields(params: PackedSeqParams) -> dict:
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def attach_hooks(model_chunks: list, *, policy: Policy) -> list:
    """Register the hook on every transformer block of every model chunk; returns the chunks."""
    for chunk in model_chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerBlock):
                hook = MicrobatchHook(module, policy)
                module.register_forward_pre_hook(hook, with_kwargs=True)
    return model_chunks
