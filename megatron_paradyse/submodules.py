"""Megatron's transformer layer, attention and MLP, each able to run the strategy of a plan.

The parameters are Megatron's own. Where the plan says megatron_ts, Megatron's own forward runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_paradyse.hook import PlannedMicrobatch
from megatron_paradyse.plan import MEGATRON_TS


class TorchNorm:
    """PyTorch's LayerNorm or RMSNorm where Megatron has neither apex nor TransformerEngine.

    Megatron's own wrapper refuses sequence parallelism; here the parameters are tagged, so that
    Megatron sums their gradients over the tensor-parallel group.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **unused):
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in kinds or config.layernorm_zero_centered_gamma:
            raise ValueError(
                f"normalization {config.normalization} with zero-centred gamma "
                f"{config.layernorm_zero_centered_gamma} needs TransformerEngine: install it"
            )
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class SwitchableLayer(TransformerLayer):
    """A transformer layer that hands its MLP the strategy that the microbatch's plan names."""

    def forward(self, *args, **kwargs):
        planned = kwargs.get("packed_seq_params")
        if isinstance(planned, PlannedMicrobatch) and isinstance(self.mlp, SwitchableMLP):
            self.mlp.strategy = planned.plan[self.layer_number].mlp
        return super().forward(*args, **kwargs)


class SwitchableSelfAttention(SelfAttention):
    """Self-attention that runs the strategy that the microbatch's plan names for its layer."""

    def forward(self, hidden_states, attention_mask, *args, packed_seq_params=None, **kwargs):
        if isinstance(packed_seq_params, PlannedMicrobatch):
            strategy = packed_seq_params.plan[self.layer_number].attention
            assert strategy == MEGATRON_TS, strategy
            packed_seq_params = packed_seq_params.original
        return super().forward(
            hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs
        )


class SwitchableMLP(MLP):
    """An MLP that runs the strategy that its layer was given for this microbatch."""

    strategy = MEGATRON_TS

    def forward(self, hidden_states, per_token_scale=None, **kwargs):
        assert self.strategy == MEGATRON_TS, self.strategy
        return super().forward(hidden_states, per_token_scale, **kwargs)


class CoreAttention(MegatronModule):
    """Local attention of a rank's heads in memory linear in the sequence length.

    Takes and gives what Megatron's DotProductAttention does: query [s, b, n/p, d], key and value
    [s, b, g/p, d] -> [s, b, n/p * d].
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        if config.softmax_type != "vanilla":
            raise ValueError(
                f"--softmax-type {config.softmax_type} has no linear-memory kernel: use vanilla"
            )
        self.causal = attn_mask_type == AttnMaskType.causal
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)
