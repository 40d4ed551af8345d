"""Megatron's multi-latent attention (--multi-latent-attention) with every strategy.

Queries are linear in a latent c_q of a token, keys and values in a latent c_kv, and a part of each
key, which is rotated and the same in all heads, is a third, c_pe. A rank computes the latents of
its own rows of the sequence. On them it is an attention like any other, with the weight

    q   [ q_up     0     0 ]
    k = [   0    k_up    I ]  [c_q, c_kv, c_pe]        of each head, rotated channels first
    v   [   0    v_up    0 ]

From "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model"
(DeepSeek-AI, 2024), section 2.1.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor
from torch.nn import functional as F

from megatron_paradyse.attention import SwitchableAttention
from megatron_paradyse.core_attention import CoreAttention
from megatron_paradyse.parameters import announce_use, normalised, of_strategy
from megatron_paradyse.plan import MEGATRON_TS
from megatron_paradyse.shapes import attention_shape
from megatron_paradyse.strategies.contract import AttentionShape, AttentionWeights
from megatron_paradyse.strategies.zero import gather_weight, zero_linear


class SwitchableLatentAttention(SwitchableAttention, MLASelfAttention):
    """Multi-latent attention that runs the strategy that the microbatch's plan names for its layer.

    Megatron's own forward runs megatron_ts where the kernel is its own. Elsewhere all is ours:
    with weights of the down projections in shards, as of its local spec, that forward leaves of
    c_pe's gradient what other ranks' heads contribute.
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
        if megatrons and planned is not None:
            megatrons = strategy == MEGATRON_TS and self._megatron_can(planned)
            packed_seq_params = planned.for_kernels(hidden_states.device)
        if megatrons:
            return super().forward(
                hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs
            )
        self._announce_use()
        if planned is None or planned.row is None:
            table, factor = self._angles(len(hidden_states) * self.pg_collection.tp.size())
        else:
            table, factor = self._angles(max(planned.row.lengths))
        return self._run(
            strategy,
            self._latents(hidden_states),
            self._weights(table.shape[-1]),
            self._shape(factor),
            self._microbatch(planned, hidden_states, table),
        )

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

    def _angles(self, length: int) -> tuple[Tensor, float]:
        """RoPE's table [length, 1, 1, d_rot], and the factor of its cosine and sine."""
        found = self.rotary_pos_emb(length)
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

    def _weights(self, num_rotated: int) -> AttentionWeights:
        """Of the rank's n/p heads: qkv [n/p 3 d, i] and proj [h, n/p d], with d of _shape()."""
        config = self.config
        content, positions, of_value = _sizes(config)
        d = max(content + positions, of_value)
        up = of_strategy(self._linear_q.weight, config).unflatten(0, (-1, content + positions))
        kv_up = of_strategy(self.linear_kv_up_proj.weight, config)
        kv_up = kv_up.unflatten(0, (-1, content + of_value))
        k_up, v_up = kv_up.split((content, of_value), dim=1)
        heads, before, after = len(up), up.shape[-1], positions

        order = _rotated_first(content, positions, num_rotated)
        q = F.pad(up[:, order], (0, kv_up.shape[-1] + after))
        turned = [channel - content for channel in order[:positions]]
        same = torch.eye(positions, dtype=up.dtype, device=up.device)[turned]
        same = F.pad(same, (before + kv_up.shape[-1], 0)).expand(heads, -1, -1)
        k = torch.cat((same, F.pad(k_up, (before, after))), dim=1)
        v = F.pad(v_up, (before, after))
        qkv = torch.stack([F.pad(t, (0, 0, 0, d - t.shape[1])) for t in (q, k, v)], dim=1)

        proj = of_strategy(self.linear_proj.weight, config)
        proj = F.pad(proj.unflatten(1, (heads, of_value)), (0, d - of_value)).flatten(1)
        return AttentionWeights(
            qkv=qkv.flatten(0, 2), proj=proj, softmax_offset=self._softmax_offset()
        )

    def _shape(self, rope_scale: float) -> AttentionShape:
        """Of heads whose queries, keys and values have as many channels as the widest of them."""
        content, positions, of_value = _sizes(self.config)
        return dataclasses.replace(
            attention_shape(self, training=self.training),
            num_kv_heads=self.config.num_attention_heads,
            head_dim=max(content + positions, of_value),
            softmax_scale=self.softmax_scale,
            rope_scale=rope_scale,
            qk_norm=None,  # the latents have been normalised
        )


def _sizes(config) -> tuple[int, int, int]:
    """Channels of a head's query: without positions, with them; and of its value."""
    return config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim


@functools.cache
def _rotated_first(content: int, positions: int, num_rotated: int) -> list[int]:
    """Of a query's channels: the rotated ones, of whose pairs Megatron has (2i, 2i + 1), then all.

    The pairs become (i, i + num_rotated / 2).
    """
    end = content + num_rotated
    pairs = [*range(content, end, 2), *range(content + 1, end, 2)]
    return [*pairs, *range(end, content + positions), *range(content)]
