"""Megatron's BERT as a masked language model of whole documents, with switchable layers.

Parameters, their names and shards are those of megatron.core's BertModel without its binary head:
documents have no second sentence. It is called as Megatron calls a GPTModel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.models.bert import bert_lm_head
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from megatron.training.vocab_utils import calculate_padded_vocab_size
from torch import Tensor

from megatron_paradyse.doors import opened
from megatron_paradyse.layer_specs import bert_layer_spec, norm_for
from megatron_paradyse.model_edges import losses_in_tiles


@dataclass(kw_only=True)
class BertModelConfig(GPTModelConfig):
    """The fields of a GPT; the model that is built of them is a MaskedLanguageModel."""

    builder: ClassVar[str] = "megatron_paradyse.bert.BertModelBuilder"


class BertModelBuilder(GPTModelBuilder):
    """Builds pipeline stages of a MaskedLanguageModel in Megatron's wrappers."""

    def build_model(self, pg_collection, pre_process=None, post_process=None, vp_stage=None):
        """One stage; pre_process and post_process by its place unless given."""
        config = self._model_config
        vp_size = config.virtual_pipeline_model_parallel_size
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage, vp_size) and is_pp_first_stage(
                pg_collection.pp
            )
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage, vp_size) and is_pp_last_stage(
                pg_collection.pp
            )
        vocab_size = config.vocab_size
        if config.should_pad_vocab:
            vocab_size = calculate_padded_vocab_size(
                vocab_size,
                config.make_vocab_size_divisible_by,
                config.transformer.tensor_model_parallel_size,
            )
        with _head_norm(config.transformer):
            return MaskedLanguageModel(
                config=config.transformer,
                num_tokentypes=0,
                transformer_layer_spec=bert_layer_spec(config, vp_stage),
                vocab_size=vocab_size,
                max_sequence_length=config.seq_length,
                pre_process=pre_process,
                post_process=post_process,
                fp16_lm_cross_entropy=config.fp16_lm_cross_entropy,
                parallel_output=config.parallel_output,
                share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
                position_embedding_type=config.position_embedding_type,
                rotary_percent=config.rotary_percent,
                seq_len_interpolation_factor=config.seq_len_interpolation_factor,
                add_binary_head=False,
                vp_stage=vp_stage,
                pg_collection=pg_collection,
            )


class MaskedLanguageModel(BertModel):
    """BertModel with GPTModel's calling convention, and a loss head that may go in tiles."""

    def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
        return "b11s"  # no [s, s] mask: kernels take the documents' lengths

    @property
    def decoder(self):
        """The transformer block, by the name that it has in a GPTModel."""
        return self.encoder

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """input_ids, position_ids, labels and loss_mask [b, s] -> losses [b, s].

        attention_mask: [b, s], true where a token is no padding; None: there is no padding, or
        packed_seq_params say which tokens are a document's.
        Without labels: logits [b, s, v/p]. On earlier pipeline stages: hidden states [s/p, b, h].
        """
        hidden = self.embedding(input_ids, position_ids) if self.pre_process else None
        angles = None
        if self.position_embedding_type == "rope":
            rotary = self.rotary_pos_emb
            longest = rotary.get_rotary_seq_len(
                None, self.encoder, hidden, self.config, packed_seq_params
            )
            angles = rotary(longest)
        if attention_mask is not None:
            attention_mask = self.bert_extended_attention_mask(attention_mask)
        hidden = self.encoder(
            hidden_states=hidden,
            attention_mask=attention_mask,
            rotary_pos_emb=angles,
            packed_seq_params=packed_seq_params,
        )
        return self.head(hidden, labels, loss_mask) if self.post_process else hidden

    def head(self, hidden: Tensor, labels: Tensor | None, loss_mask: Tensor | None) -> Tensor:
        """hidden [s/p, b, h], after the final norm -> losses [b, s], or logits without labels."""
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        hidden = self.lm_head(hidden)
        if losses_in_tiles(self, labels) is not None:
            return self.output_layer(hidden, weight, labels=labels, loss_mask=loss_mask)
        logits, _ = self.output_layer(hidden, weight=weight)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)


@contextlib.contextmanager
def _head_norm(model) -> Iterator[None]:
    """The norm of the head as those of the layers."""
    with opened([(bert_lm_head, "LNImpl", norm_for(bert_lm_head.LNImpl, model))]):
        yield
