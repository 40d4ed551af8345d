"""Megatron's multi-latent attention (--multi-latent-attention) with every strategy.

A rank computes the latents of its own rows of the sequence, with down projections that are whole on
every rank, or gathered. What strategies make of them: strategies/latents.py.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor
from torch.nn import functional as F

from megatron_paradyse.attention import SwitchableAttention
from megatron_paradyse.core_attention import CoreAttention, NormedLinear
from megatron_paradyse.microbatch_params import PlannedMicrobatch
from megatron_paradyse.parameters import announce_use, normalised, of_strategy
from megatron_paradyse.plan import MEGATRON_TS
from megatron_paradyse.shapes import attention_shape
from megatron_paradyse.strategies.contract import AttentionShape, AttentionWeights, LatentSizes
from megatron_paradyse.strategies.zero import gather_weight, zero_linear


class SwitchableLatentAttention(SwitchableAttention, MLASelfAttention):
    """Multi-latent attention that runs the strategy that the microbatch's plan names for its layer.

    Megatron's own forward generates text, and runs megatron_ts where the kernel is its own.
    Elsewhere all is ours: with weights of the down projections in shards, as of its local spec,
    that forward leaves of c_pe's gradient what other ranks' heads contribute.
    """

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
        megatrons = not isinstance(self.core_attention, CoreAttention)
        if kwargs.get("inference_context") is not None or InferenceMode.is_active():
            megatrons = True
        elif megatrons and planned is not None:
            megatrons = strategy == MEGATRON_TS and self._megatron_can(planned)
            packed_seq_params = planned.for_kernels(hidden_states.device)
        if megatrons:
            return super().forward(
                hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs
            )
        self._announce_use()  # first: what is read after it has been gathered
        seq_length = len(hidden_states) * self.pg_collection.tp.size()
        table, factor = self.angles(planned, seq_length)
        return self._run(
            strategy,
            self._latents(hidden_states),
            self._weights(),
            self._shape(factor),
            self._microbatch(planned, hidden_states, table),
        )

    def _resolve_qk_norm_config(self, submodules):
        """The classes of norms and projections, by name.

        Without a rank of queries Megatron has their norm in TransformerEngine's linear alone.
        """
        resolver = QKNormConfigResolver(self.config, submodules)
        in_linear = self.config.qk_layernorm and self.config.q_lora_rank is None
        if in_linear and resolver.fused_norm_linear_impl is None:
            resolver.submodules = dataclasses.replace(submodules, q_layernorm=IdentityOp)
            resolver.fused_norm_linear_impl = NormedLinear
        return resolver.resolve()

    def _announce_use(self) -> None:
        names = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "q_layernorm")
        of_queries = (getattr(self, name, None) for name in names)
        announce_use(
            *of_queries,
            self.linear_kv_down_proj,
            self.linear_kv_up_proj,
            self.kv_layernorm,
            self.core_attention,
            self.linear_proj,
        )

    @property
    def _linear_q(self):
        return self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj

    def angles(self, planned: PlannedMicrobatch | None, seq_length: int) -> tuple[Tensor, float]:
        """RoPE's table [longest document, 1, 1, d_rot], and the factor of its cosine and sine."""
        row = None if planned is None else planned.row
        found = self.rotary_pos_emb(seq_length if row is None else row.longest)
        return found if isinstance(found, tuple) else (found, 1.0)

    def _latents(self, x: Tensor) -> Tensor:
        """x [s/p, b, h] -> [c_q, c_kv, c_pe] of the same rows; without a rank of q, c_q is x."""
        config = self.config
        queries = x
        if config.q_lora_rank is not None:
            queries = self.q_layernorm(self._down(x, self.linear_q_down_proj, config.q_lora_rank))
        both = config.kv_lora_rank + config.qk_pos_emb_head_dim
        kv = self._down(x, self.linear_kv_down_proj, both)
        kv, of_positions = kv.split((config.kv_lora_rank, config.qk_pos_emb_head_dim), dim=-1)
        queries = normalised(queries, self._linear_q, config)
        kv = normalised(self.kv_layernorm(kv), self.linear_kv_up_proj, config)
        return torch.cat((queries, kv, of_positions), dim=-1)

    def _down(self, x: Tensor, linear, size: int) -> Tensor:
        """x [s/p, b, h] -> [s/p, b, size], by a weight that is whole on every rank or in shards."""
        weight, group = of_strategy(linear.weight, self.config), self.pg_collection.tp
        if len(weight) == size:
            return F.linear(x, weight)
        return zero_linear(x, gather_weight(weight, group), weight, None, group)

    def _weights(self) -> AttentionWeights:
        config = self.config
        return AttentionWeights(
            qkv=of_strategy(self._linear_q.weight, config),
            kv_up=of_strategy(self.linear_kv_up_proj.weight, config),
            proj=of_strategy(self.linear_proj.weight, config),
            softmax_offset=self._softmax_offset(),
        )

    def _shape(self, rope_scale: float) -> AttentionShape:
        config = self.config
        sizes = LatentSizes(
            keys=config.kv_lora_rank,
            content=config.qk_head_dim,
            positions=config.qk_pos_emb_head_dim,
            value=config.v_head_dim,
        )
        shape = attention_shape(self, training=self.training)
        return _over_latents(shape, sizes, self.softmax_scale, rope_scale)


@functools.cache
def _over_latents(
    shape: AttentionShape, sizes: LatentSizes, softmax_scale: float, rope_scale: float
) -> AttentionShape:
    return dataclasses.replace(
        shape,
        num_kv_heads=shape.num_heads,
        head_dim=sizes.head_dim,
        softmax_scale=softmax_scale,
        rope_scale=rope_scale,
        qk_norm=None,  # the latents have been normalised
        latent=sizes,
    )
