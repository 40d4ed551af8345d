"""Megatron's output layer, embedding and RoPE table, each able to hold only what a rank needs.

The modules, their parameters, names and shards stay Megatron's; attach_edges gives them a class
whose forward goes in tiles (edges/) when the microbatch is longer than one, else is Megatron's.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.models.common.embeddings.language_model_embedding import (
    LanguageModelEmbedding,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_paradyse.edges.cross_entropy import tiled_cross_entropy
from megatron_paradyse.edges.embedding import tiled_embedding, tiled_positions
from megatron_paradyse.edges.tiles import AUTO, OFF, automatic_tile
from megatron_paradyse.errors import UserError


def attach_edges(
    model_chunks: list,
    *,
    head_tile: str | int,
    positions_restart: bool = False,
    learns_all: bool = True,
) -> list:
    """Let the chunks' edges go in tiles of head_tile tokens, "auto" or "off"; returns the chunks.

    positions_restart: sequences may hold several documents. learns_all: whether all tokens are
    learnt; else the head computes those that are, of short microbatches too. A head or embedding
    that is not Megatron's stays as it is, and the head of a GPT whose forward takes no
    output_processor. The RoPE table is one for all lengths in any case, and for all layers
    of a chunk with latent attention.
    """
    for chunk in model_chunks:
        latent = [m for m in chunk.modules() if isinstance(m, MultiLatentAttention)]
        for module in latent:
            module.rotary_pos_emb = latent[0].rotary_pos_emb
    for module in (m for chunk in model_chunks for m in chunk.modules()):
        if type(module) in ONE_TABLE:
            module.__class__ = ONE_TABLE[type(module)]
        if isinstance(module, GPTModel | BertModel) and head_tile != OFF:
            tile = _tile(module.config, module.vocab_size, head_tile)
            if module.pre_process or getattr(module, "mtp_process", False):
                _tile_embedding(module.embedding, tile, positions_restart)
            if not module.post_process or type(module.output_layer) is not ColumnParallelLinear:
                continue  # another's head, of rewards say
            forward = inspect.signature(module.forward)
            if isinstance(module, GPTModel) and not _takes_processor(forward):
                continue
            _become(module.output_layer, TiledOutputLayer, tile)
            module.output_layer.learns_all = learns_all
            if isinstance(module, GPTModel):
                if module.config.use_mup:  # a BERT's Megatron does not scale
                    module.output_layer.logits_scale = module.config.mup_output_mult
                ask = functools.partial(_ask_for_losses, forward)
                module.register_forward_pre_hook(ask, with_kwargs=True)
    return model_chunks


def _tile(config, vocab_size: int, head_tile: str | int) -> int:
    if head_tile != AUTO:
        return int(head_tile)
    return automatic_tile(
        h=config.hidden_size,
        vocab_shard=vocab_size // config.tensor_model_parallel_size,
        element_bytes=config.params_dtype.itemsize,
    )


def _become(module: Any, kind: type, tile: int) -> None:
    module.tile = tile
    assert type(module) is kind.__base__, f"{type(module)} has another forward"
    module.__class__ = kind


class TiledOutputLayer(ColumnParallelLinear):
    """Megatron's output layer, which can also give the losses without ever holding all logits."""

    tile: int
    learns_all = True
    logits_scale = 1.0  # of losses; Megatron scales the logits of its own head

    def takes(self, labels: Tensor) -> bool:
        """Whether the losses of these labels shall be computed here, not by Megatron's head."""
        return labels.numel() > self.tile or not self.learns_all

    def forward(
        self,
        input_,
        weight=None,
        runtime_gather_output=None,
        *,
        labels=None,
        loss_mask=None,
        predicted=None,
    ):
        """Without labels as Megatron's. With labels [b, s]: losses [b, s] of input_ [s/p, b, h].

        Unless all tokens are learnt, losses are 0 where loss_mask [b, s] is. predicted [b, s]:
        filled with the likeliest labels.
        """
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        assert self.sequence_parallel or self.tp_group.size() == 1, "input_ is the rank's chunk"
        weight = self.weight if weight is None else weight
        return tiled_cross_entropy(
            input_,
            weight,
            labels,
            self.tp_group,
            tile=self.tile,
            bias=self.bias,
            token_weights=loss_mask,
            take_weight_gradient=functools.partial(
                _take_weight_gradient, weight, fused=self.gradient_accumulation_fusion
            ),
            predicted=predicted,
            counted=None if self.learns_all or loss_mask is None else loss_mask != 0,
            logits_scale=self.logits_scale,
        )


def losses_in_tiles(model: GPTModel | BertModel, labels: Tensor | None):
    """Megatron's output_processor for a microbatch, or None where its own head should run.

    That is where logits are wanted (no labels, inference), and where all fit into one tile and all
    are needed.
    """
    layer = model.output_layer
    if labels is None or InferenceMode.is_active() or not isinstance(layer, TiledOutputLayer):
        return None
    return _losses if layer.takes(labels) else None


def _losses(*, hidden_states, output_layer, output_weight, labels, loss_mask, **unused) -> Tensor:
    return output_layer(hidden_states, output_weight, labels=labels, loss_mask=loss_mask)


def _takes_processor(forward: inspect.Signature) -> bool:
    """By its name, or as any argument."""
    kinds = {parameter.kind for parameter in forward.parameters.values()}
    return "output_processor" in forward.parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _ask_for_losses(forward: inspect.Signature, model: GPTModel, args, kwargs):
    """Forward pre-hook of a model whose forward takes these arguments."""
    given = {**forward.bind(*args, **kwargs).arguments, **kwargs}
    processor = losses_in_tiles(model, given.get("labels"))
    if processor is not None and given.get("output_processor") is None:
        kwargs["output_processor"] = processor
    return args, kwargs


def _take_weight_gradient(weight, grad: Tensor, *, fused: bool) -> Tensor:
    """The gradient for autograd, or with gradient accumulation fusion a dummy.

    Then grad, float32, goes into main_grad unrounded, and the mark tells Megatron's DDP so, as its
    own linears do. The dummy is zero where an embedding's gradient is added to it (tied weights).
    """
    if not (fused and hasattr(weight, "main_grad")):
        return grad.to(weight.dtype)
    weight.main_grad.add_(grad)
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def _tile_embedding(embedding, tile: int, positions_restart: bool) -> None:
    if not (embedding.config.sequence_parallel and embedding.scatter_to_sequence_parallel):
        return  # every rank needs all of it
    parts = [
        (embedding, LanguageModelEmbedding),
        (embedding.word_embeddings, VocabParallelEmbedding),
    ]
    if embedding.add_position_embedding:
        parts.append((embedding.position_embeddings, torch.nn.Embedding))
    if any(type(module) is not kind for module, kind in parts):
        return  # another's
    _become(embedding, TiledLanguageModelEmbedding, tile)
    _become(embedding.word_embeddings, TiledWords, tile)
    if embedding.add_position_embedding:
        _become(embedding.position_embeddings, TiledPositions, tile)
        embedding.position_embeddings.group = embedding.tp_group
        embedding.position_embeddings.restart = positions_restart


class TiledLanguageModelEmbedding(LanguageModelEmbedding):
    """Megatron's embedding, whose words and positions may come as [s/p, b, h] at once."""

    tile: int

    def forward(self, input_ids, position_ids, tokentype_ids=None):
        """As Megatron's. Microbatches longer than a tile are looked up in tiles.

        Not while sequence parallelism is off, as it is while Megatron generates text.
        """
        shards, (s, p) = self.config.sequence_parallel, (input_ids.shape[1], self.tp_group.size())
        if shards and s % p:
            raise UserError(f"a sequence of {s} tokens on {p} ranks: pad it to a multiple of {p}")
        in_tiles = input_ids.numel() > self.tile and not InferenceMode.is_active()
        in_tiles = in_tiles and shards and not self.config.deterministic_mode
        self.word_embeddings.in_tiles = in_tiles
        whole_positions = self.add_position_embedding and not in_tiles
        self.reduce_scatter_embeddings = shards and not whole_positions
        if self.add_position_embedding:
            self.position_embeddings.in_tiles = in_tiles
        return super().forward(input_ids, position_ids, tokentype_ids)


class TiledWords(VocabParallelEmbedding):
    tile: int
    in_tiles = False

    def forward(self, input_):
        """tokens [b, s] -> [s/p, b, h] in tiles, or as Megatron's."""
        if not self.in_tiles:
            return super().forward(input_)
        return tiled_embedding(input_, self.weight, self.tp_group, tile=self.tile)


class TiledPositions(torch.nn.Embedding):
    tile: int
    group: ProcessGroup
    restart: bool
    in_tiles = False

    def forward(self, input):
        """positions [b, s] -> [s/p, b, h] in tiles, or [b, s, h]."""
        if not self.in_tiles:
            return super().forward(input)
        return tiled_positions(input, self.weight, self.group, tile=self.tile, restart=self.restart)


class OneTableRotaryEmbedding(RotaryEmbedding):
    """Angles [s, 1, 1, d] of every length as the beginning of those of the longest yet.

    Megatron keeps the tables of the last 32 lengths, 4 d bytes a token each: of documents all of
    different lengths, gigabytes.
    """

    _table: Tensor | None = None

    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None):
        cp_group = cp_group or self.cp_group
        if offset or (cp_group is not None and cp_group.size() > 1):
            return super().forward(max_seq_len, offset, packed_seq, cp_group)
        if self._table is None or self._table.shape[0] < max_seq_len:
            self._table = None  # before the longer one is made
            self._table = self._make_table(max_seq_len)
        return self._table[:max_seq_len]

    def _make_table(self, max_seq_len: int) -> Tensor:
        return self.get_emb(max_seq_len)


class OneTableYarnRotaryEmbedding(OneTableRotaryEmbedding, YarnRotaryEmbedding):
    """YaRN's angles in one table as well, and the factor of their cosine and sine."""

    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None):
        found = super().forward(max_seq_len, offset, packed_seq, cp_group)
        return found if isinstance(found, tuple) else (found, self._factor)

    def _make_table(self, max_seq_len: int) -> Tensor:
        table, self._factor = self.get_emb(max_seq_len)
        return table


ONE_TABLE = {
    RotaryEmbedding: OneTableRotaryEmbedding,
    YarnRotaryEmbedding: OneTableYarnRotaryEmbedding,
}


def forget_lengths(model_chunks: list) -> None:
    """Let go of what has the length of the longest microbatch yet, and which plans count.

    Megatron's gather buffer, and RoPE's tables.
    """
    get_global_memory_buffer().buffer.clear()
    for module in (m for chunk in model_chunks for m in chunk.modules()):
        if isinstance(module, OneTableRotaryEmbedding):
            module._table = None
