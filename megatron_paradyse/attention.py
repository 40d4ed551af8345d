"""Megatron's self-attention, able to run the strategy of a plan.

The parameters are Megatron's own. Where the plan says megatron_ts, Megatron's own forward runs;
elsewhere a strategy reaches the same parameters.
"""

from __future__ import annotations

import contextlib
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_paradyse.core_attention import CoreAttention
from megatron_paradyse.microbatch_params import PlannedMicrobatch
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.parameters import announce_use, bias_of, normalised, of_strategy
from megatron_paradyse.plan import MEGATRON_TS
from megatron_paradyse.shapes import attention_shape
from megatron_paradyse.strategies import base_name, get_strategy
from megatron_paradyse.strategies.contract import AttentionShape, AttentionWeights, Microbatch
from megatron_paradyse.strategies.marks import check_heeds
from megatron_paradyse.strategies.order import in_order


class SwitchableAttention:
    """What an attention module of Megatron needs to run what a microbatch's plan names."""

    config: Any
    layer_number: int
    core_attention: Any
    linear_proj: Any
    pg_collection: Any

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.plan_number = self.layer_number  # prediction.py sets others

    def _chosen(self, packed_seq_params) -> tuple[PlannedMicrobatch | None, str]:
        """The planned microbatch, None of one without a plan, and its strategy for this layer."""
        if not isinstance(packed_seq_params, PlannedMicrobatch):
            return None, MEGATRON_TS
        return packed_seq_params, base_name(packed_seq_params.plan[self.plan_number].attention)

    def _run(
        self,
        strategy: str,
        x: Tensor,
        weights: AttentionWeights,
        shape: AttentionShape,
        microbatch: Microbatch,
    ) -> tuple[Tensor, Tensor | None]:
        """x [s/p, b, i] -> [s/p, b, h] and the bias that is still to be added to it."""
        chosen = get_strategy(strategy)
        check_heeds(
            chosen,
            offset=weights.softmax_offset is not None,
            latents=shape.latent is not None,
            gate=shape.output_gate,
        )
        out = chosen.attention(x, weights, shape, microbatch, self.pg_collection.tp)
        return out, bias_of(self.linear_proj)

    def _megatron_can(self, planned: PlannedMicrobatch) -> bool:
        """Whether Megatron's own forward can run it; else megatron_ts of this package does.

        A core attention other than ours takes packed documents in the order of its rows, and not
        in every version with a softmax that has one more logit.
        """
        if planned.wide is not None:
            return False
        if planned.row is None or isinstance(self.core_attention, CoreAttention):
            return True
        return self.config.softmax_type == "vanilla" and in_order(microbatch_of(planned.row))

    def _softmax_offset(self) -> Tensor | None:
        offset = getattr(self.core_attention, "softmax_offset", None)
        return None if offset is None else offset.flatten()

    def _microbatch(
        self, planned: PlannedMicrobatch | None, hidden_states: Tensor, table: Tensor | None
    ) -> Microbatch:
        """Of hidden_states [s/p, b, h]; table: RoPE's angles [s or more, 1, 1, d_rot]."""
        rows, batch_size = hidden_states.shape[:2]
        size = {"seq_length": rows * self.pg_collection.tp.size(), "batch_size": batch_size}
        if planned is not None and planned.row is not None:
            size["seq_length"] = planned.row.seq_length  # of all groups, if it is wide
        if planned is None:
            return Microbatch(**size, rope=None if table is None else table[:, 0, 0, :])
        return Microbatch(
            **size,
            documents=planned.documents,
            shards=planned.shards,
            rope=None if table is None else planned.angles(table)[:, 0, 0, :],
            dropout_seed=planned.dropout_seed(self.plan_number),
            wide=planned.wide,
        )


class SwitchableSelfAttention(SwitchableAttention, SelfAttention):
    """Self-attention that runs the strategy that the microbatch's plan names for its layer."""

    attn_mask_type: AttnMaskType

    def forward(
        self,
        hidden_states,
        attention_mask,
        *args,
        rotary_pos_emb=None,
        packed_seq_params=None,
        **kwargs,
    ):
        planned, strategy = self._chosen(packed_seq_params)
        if strategy == MEGATRON_TS and (planned is None or self._megatron_can(planned)):
            if planned is not None and isinstance(self.core_attention, CoreAttention):
                rotary_pos_emb = _per_row(planned, rotary_pos_emb)
            elif planned is not None:
                packed_seq_params = planned.for_kernels(hidden_states.device)
            with self._without_padding(attention_mask):
                return super().forward(
                    hidden_states,
                    attention_mask,
                    *args,
                    rotary_pos_emb=rotary_pos_emb,
                    packed_seq_params=packed_seq_params,
                    **kwargs,
                )
        if isinstance(rotary_pos_emb, tuple):
            rotary_pos_emb = rotary_pos_emb[0]
        if self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]:
            rotary_pos_emb = None
        weights = self._weights()  # first: what is read after it has been gathered
        return self._run(
            strategy,
            normalised(hidden_states, self.linear_qkv, self.config),
            weights,
            attention_shape(self, training=self.training),
            self._microbatch(planned, hidden_states, rotary_pos_emb),
        )

    @contextlib.contextmanager
    def _without_padding(self, attention_mask):
        """Of "padding" TransformerEngine demands a mask, and a BERT has none where nothing is."""
        declared = self.attn_mask_type
        if attention_mask is None and declared == AttnMaskType.padding:
            self.attn_mask_type = AttnMaskType.no_mask
        try:
            yield
        finally:
            self.attn_mask_type = declared

    def _weights(self) -> AttentionWeights:
        q_norm, k_norm = self.q_layernorm, self.k_layernorm
        announce_use(self.linear_qkv, self.linear_proj, q_norm, k_norm, self.core_attention)
        return AttentionWeights(
            qkv=of_strategy(self.linear_qkv.weight, self.config),
            proj=of_strategy(self.linear_proj.weight, self.config),
            qkv_bias=bias_of(self.linear_qkv),
            q_norm=getattr(q_norm, "weight", None),
            q_norm_bias=getattr(q_norm, "bias", None),
            k_norm=getattr(k_norm, "weight", None),
            k_norm_bias=getattr(k_norm, "bias", None),
            softmax_offset=self._softmax_offset(),
        )


def _per_row(planned: PlannedMicrobatch, table):
    """RoPE's table, or that of queries and that of keys -> the angles of every row gathered."""
    if isinstance(table, tuple):
        return tuple(_per_row(planned, part) for part in table)
    return None if table is None else planned.angles(table, by_rows=True)
