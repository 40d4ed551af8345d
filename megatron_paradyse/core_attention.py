"""What takes the place of modules that Megatron has with apex or TransformerEngine only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional as F

from megatron_paradyse.errors import UserError
from megatron_paradyse.parameters import normalised
from megatron_paradyse.shapes import attention_shape
from megatron_paradyse.strategies.blocks import Span, whole
from megatron_paradyse.strategies.contract import Microbatch
from megatron_paradyse.strategies.local_attention import AttentionTask, local_attention
from megatron_paradyse.strategies.order import to_positions, to_rows
from megatron_paradyse.strategies.rms_norm import RmsNorm
from megatron_paradyse.strategies.softmax_offset import in_float


class TorchNorm:
    """PyTorch's LayerNorm or our RMSNorm where Megatron can build none (layer_specs.norm_for).

    Megatron's own wrapper refuses sequence parallelism; here the parameters are tagged, so that
    Megatron sums their gradients over the tensor-parallel group.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **unused):
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": RmsNorm}
        if config.normalization not in kinds or config.layernorm_zero_centered_gamma:
            raise UserError(
                f"normalization {config.normalization} with zero-centred gamma "
                f"{config.layernorm_zero_centered_gamma} needs TransformerEngine: install it"
            )
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class NormedLinear(ColumnParallelLinear):
    """Megatron's linear with the norm of its input inside, by the names of TransformerEngine's."""

    def __init__(self, input_size: int, output_size: int, *, config, **of_linear):
        super().__init__(input_size, output_size, config=config, **of_linear)
        norm: Any = TorchNorm(config, input_size)
        self.layer_norm_weight = norm.weight
        self.register_parameter("layer_norm_bias", getattr(norm, "bias", None))

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(normalised(hidden_states, self, self.config), *args, **kwargs)


class CoreAttention(MegatronModule):
    """Local attention of a rank's heads in memory linear in the sequence length.

    Takes and gives what Megatron's DotProductAttention does: query [s, b, n/p, d], key and value
    [s, b, g/p, d] -> [s, b, n/p * d]. Of latent attention (k_channels), whose values may have
    another d, it runs while text is generated; else it only has the offset. Then queries are fewer,
    and are the last of the keys.
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
        k_channels: int | None = None,
        v_channels: int | None = None,
    ):
        super().__init__(config=config)
        self.layer_number = self.plan_number = layer_number  # prediction.py sets the second
        self.attn_mask_type = attn_mask_type
        self.tp_group = pg_collection.tp
        self.latent_scale = None if k_channels is None else softmax_scale
        self.softmax_offset: Tensor | None = None  # [n/p]
        if config.softmax_type != "vanilla":
            own = DotProductAttention(
                config, layer_number, attn_mask_type, attention_type, pg_collection=pg_collection
            )
            self.softmax_offset = own.softmax_offset  # a parameter if it is learnable

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
        planned = packed_seq_params
        seed = planned.dropout_seed(self.plan_number) if planned is not None else 0
        microbatch = Microbatch(
            key.shape[0],
            key.shape[1],
            documents=planned.documents if planned is not None else None,
            shards=planned.shards if planned is not None else None,
            dropout_seed=seed,
        )
        query, key, value = (to_positions(x, microbatch) for x in (query, key, value))
        if value.requires_grad and _is_view_of_more(value) and not _is_view_of_more(query):
            value = value.clone()  # else what was queries and keys before RoPE stays until backward
        shape, num_channels = attention_shape(self, training=self.training), value.shape[-1]
        if self.latent_scale is not None:
            shape = dataclasses.replace(shape, softmax_scale=self.latent_scale)
            query, key, value = _of_one_size(query, key, value)
        task = AttentionTask(
            shape,
            microbatch,
            first_head=self.tp_group.rank() * query.shape[2],
        )
        queries, keys = _spans(microbatch, num_queries=query.shape[0])
        out = local_attention(
            query,
            key,
            value,
            spans=queries,
            k_spans=keys,
            task=task,
            offset=in_float(self.softmax_offset),
        )
        return to_rows(out[..., :num_channels], microbatch).flatten(2)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """As Megatron's own attention has it, with the learnable offsets of heads."""
        if self.config.softmax_type != "learnable":
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        as_megatron: Any = DotProductAttention.sharded_state_dict
        return as_megatron(self, prefix, sharded_offsets, metadata)


def _spans(
    microbatch: Microbatch, *, num_queries: int
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Of the queries and of the keys: the same positions, or the queries' are the last of them."""
    s = microbatch.seq_length
    if num_queries == s:
        return whole(microbatch), whole(microbatch)
    earlier = s - num_queries
    return (Span(0, earlier, s),), (Span(0, 0, earlier), Span(earlier, earlier, s))


def _of_one_size(*heads: Tensor) -> Iterator[Tensor]:
    """[s, b, m, ...] each -> [s, b, m, d] of the widest; what is missing is 0."""
    d = max(x.shape[-1] for x in heads)
    return (F.pad(x, (0, d - x.shape[-1])) for x in heads)


def _is_view_of_more(x: Tensor) -> bool:
    return x.untyped_storage().nbytes() > x.nbytes
