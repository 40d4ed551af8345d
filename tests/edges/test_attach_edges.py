"""Which of Megatron's modules go in tiles, when, and with what."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.models.common.embeddings.language_model_embedding import (
    LanguageModelEmbedding,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_paradyse import model_edges
from megatron_paradyse.edges.tiles import automatic_tile
from megatron_paradyse.errors import UserError
from megatron_paradyse.model_edges import TiledOutputLayer, attach_edges, forget_lengths

TILE, P = 6, 2
GROUP = SimpleNamespace(size=lambda: P)
CONFIG = {
    "hidden_size": 2048, "tensor_model_parallel_size": P, "params_dtype": torch.bfloat16,
    "use_mup": False, "mup_output_mult": 0.25, "sequence_parallel": True,
    "deterministic_mode": False,
}  # fmt: skip


def _bare(kind: type, **attributes):
    """A module of Megatron's without what its constructor makes."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class _Gpt(GPTModel):
    """Gives what it was asked with."""

    def forward(self, input_ids, labels=None, *, output_processor=None):
        return output_processor


class _OfAny(GPTModel):
    def forward(self, input_ids, **options):
        return options.get("output_processor")


class _OfNone(GPTModel):
    def forward(self, input_ids, labels=None):
        return None


class _Head(ColumnParallelLinear): ...


def _embedding(**more):
    parts = {
        "word_embeddings": _bare(VocabParallelEmbedding),
        "position_embeddings": torch.nn.Embedding(8, 2),
        "config": SimpleNamespace(**CONFIG), "add_position_embedding": True, "tp_group": GROUP,
        "scatter_to_sequence_parallel": True,
    }  # fmt: skip
    return _bare(LanguageModelEmbedding, **{**parts, **more})


def _model(kind: type = _Gpt, *, head: type = ColumnParallelLinear, mup=False, **more):
    parts = {
        "config": SimpleNamespace(**{**CONFIG, "use_mup": mup}), "vocab_size": 100_000,
        "pre_process": False, "post_process": True, "output_layer": _bare(head),
    }  # fmt: skip
    return _bare(kind, **{**parts, **more})


def _attached(model, head_tile=TILE, **more):
    chunks = [torch.nn.ModuleList([model])]
    assert attach_edges(chunks, head_tile=head_tile, **more) is chunks
    return model


@pytest.mark.parametrize(
    ("kind", "mup", "scale"),
    [(_Gpt, False, 1.0), (_Gpt, True, 0.25), (_OfAny, True, 0.25), (BertModel, True, 1.0)],
)
def test_a_head_in_tiles_scales_logits_as_megatron_does(kind, mup, scale):
    head = _attached(_model(kind, mup=mup), learns_all=False).output_layer
    assert type(head) is TiledOutputLayer
    assert (head.logits_scale, head.tile, head.learns_all) == (scale, TILE, False)


def test_the_automatic_tile_is_of_the_models_sizes():
    head = _attached(_model(), "auto").output_layer
    assert head.tile == automatic_tile(h=2048, vocab_shard=50_000, element_bytes=2)
    assert head.learns_all


@pytest.mark.parametrize(
    "model",
    [_model(head=_Head), _model(_OfNone), _model(post_process=False)],
    ids=["another's head", "no output_processor", "a stage before the last"],
)
def test_a_head_that_cannot_be_asked_for_losses_stays(model):
    head = type(model.output_layer)
    assert type(_attached(model).output_layer) is head
    assert not model._forward_pre_hooks


def test_without_tiles_edges_stay():
    model = _attached(_model(pre_process=True, embedding=_embedding()), "off")
    assert type(model.output_layer) is ColumnParallelLinear
    assert type(model.embedding) is LanguageModelEmbedding


@pytest.mark.parametrize("kind", [_Gpt, _OfAny])
@pytest.mark.parametrize(
    ("num_tokens", "learns_all", "tiled"),
    [(TILE, True, False), (TILE + 1, True, True), (1, False, True)],
)
def test_losses_are_asked_of_the_head_beyond_a_tile_or_where_not_all_are_needed(
    num_tokens, learns_all, tiled, kind
):
    model = _attached(_model(kind), learns_all=learns_all)
    labels = torch.zeros(1, num_tokens)
    expected = model_edges._losses if tiled else None
    assert model(labels, labels=labels) is expected
    if kind is _Gpt:
        assert model(labels, labels) is expected
    assert model(labels) is None, "logits are wanted"
    with InferenceMode.active():
        assert model(labels, labels=labels) is None
    assert model(labels, labels=labels, output_processor=print) is print


@pytest.mark.parametrize("learns_all", [True, False])
def test_the_head_in_tiles_has_megatrons_weights_mask_and_group(learns_all, monkeypatch):
    seen = []
    monkeypatch.setattr(
        model_edges, "tiled_cross_entropy", lambda *given, **how: seen.append((given, how))
    )
    head = _bare(
        TiledOutputLayer, tile=TILE, tp_group=GROUP, sequence_parallel=True, bias="bias",
        learns_all=learns_all, logits_scale=3.0, gradient_accumulation_fusion=True,
    )  # fmt: skip
    head.weight = torch.nn.Parameter(torch.zeros(3, 2))
    head.weight.main_grad = torch.zeros(3, 2)
    mask = torch.tensor([[0.0, 0.5]])
    ask = {"output_layer": head, "labels": "labels", "hidden_states": "hidden"}
    model_edges._losses(**ask, output_weight=None, loss_mask=mask, context=None)
    (given, how), grad = seen[0], torch.ones(3, 2)
    assert given[0] == "hidden" and given[1] is head.weight and given[2:] == ("labels", GROUP)
    assert how["token_weights"] is mask
    assert (how["tile"], how["bias"], how["logits_scale"], how["predicted"]) == (
        TILE, "bias", 3.0, None,
    )  # fmt: skip
    how["take_weight_gradient"](grad)
    assert torch.equal(head.weight.main_grad, grad), "fused"
    counted = how["counted"]
    assert counted is None if learns_all else counted.tolist() == [[False, True]]
    tied = torch.nn.Parameter(torch.zeros(3, 2))
    head("hidden", tied, labels="labels", predicted="likeliest")  # without a mask all are counted
    (given, how) = seen[1]
    assert given[1] is tied and (how["counted"], how["predicted"]) == (None, "likeliest")


def test_without_labels_the_head_is_megatrons(monkeypatch):
    monkeypatch.setattr(ColumnParallelLinear, "forward", lambda self, *given: given)
    assert _bare(TiledOutputLayer)("hidden", "weight", True) == ("hidden", "weight", True)


@pytest.mark.parametrize("more", [{"pre_process": True}, {"mtp_process": True}])
@pytest.mark.parametrize("positions", [True, False])
def test_an_embedding_goes_in_tiles_where_a_stage_has_one(positions, more):
    embedding = _embedding(add_position_embedding=positions)
    _attached(_model(embedding=embedding, **more), positions_restart=True)
    assert type(embedding) is model_edges.TiledLanguageModelEmbedding
    assert type(embedding.word_embeddings) is model_edges.TiledWords
    assert embedding.tile == embedding.word_embeddings.tile == TILE
    table = embedding.position_embeddings
    if positions:
        assert type(table) is model_edges.TiledPositions
        assert (table.tile, table.group, table.restart) == (TILE, GROUP, True)
    else:
        assert type(table) is torch.nn.Embedding


class _Words(VocabParallelEmbedding): ...


@pytest.mark.parametrize(
    "more",
    [
        {"word_embeddings": _bare(_Words)},
        {"position_embeddings": torch.nn.Module()},
        {"scatter_to_sequence_parallel": False},
        {"config": SimpleNamespace(**{**CONFIG, "sequence_parallel": False})},
    ],
    ids=["another's words", "another's positions", "whole on every rank", "not shared"],
)
def test_an_embedding_of_another_kind_stays(more):
    embedding = _embedding(**more)
    words = type(embedding.word_embeddings)
    _attached(_model(pre_process=True, embedding=embedding))
    assert type(embedding) is LanguageModelEmbedding
    assert type(embedding.word_embeddings) is words


LOOKED_UP = [  # tokens, positions, settings, generates -> in tiles, whether words come scattered
    (TILE, False, {}, False, False, True),
    (TILE, True, {}, False, False, False),
    (TILE + P, False, {}, False, True, True),
    (TILE + P, True, {}, False, True, True),
    (TILE + P, True, {}, True, False, False),
    (TILE + P, True, {"deterministic_mode": True}, False, False, False),
    (TILE + P + 1, False, {"sequence_parallel": False}, False, False, False),
]


@pytest.mark.parametrize(
    ("num_tokens", "positions", "settings", "generates", "in_tiles", "scattered"), LOOKED_UP
)
def test_long_microbatches_are_looked_up_in_tiles(
    num_tokens, positions, settings, generates, in_tiles, scattered, monkeypatch
):
    monkeypatch.setattr(LanguageModelEmbedding, "forward", lambda self, *given: given)
    embedding = _embedding(add_position_embedding=positions)
    _attached(_model(pre_process=True, embedding=embedding))
    vars(embedding.config).update(settings)
    tokens = torch.zeros(1, num_tokens)
    with InferenceMode.active() if generates else contextlib.nullcontext():
        assert embedding(tokens, "positions", "kinds") == (tokens, "positions", "kinds")
    assert embedding.word_embeddings.in_tiles is in_tiles
    if positions:
        assert embedding.position_embeddings.in_tiles is in_tiles
    assert embedding.reduce_scatter_embeddings is scattered


def test_a_sequence_that_ranks_cannot_share_is_refused():
    embedding = _embedding()
    _attached(_model(pre_process=True, embedding=embedding))
    with pytest.raises(UserError, match="a sequence of 5 tokens on 2 ranks: pad it to a mult"):
        embedding(torch.zeros(2, 5), None)


def test_angles_are_megatrons_from_an_offset_on_and_once_lengths_are_forgotten(monkeypatch):
    memory = SimpleNamespace(buffer={"gathered": torch.zeros(8)})
    monkeypatch.setattr(model_edges, "get_global_memory_buffer", lambda: memory)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    one = _attached(RotaryEmbedding(16, 1.0, use_cpu_initialization=True))
    theirs = RotaryEmbedding(16, 1.0, use_cpu_initialization=True)
    one(8)
    assert torch.equal(one(4, offset=3), theirs(4, offset=3))
    forget_lengths([torch.nn.ModuleList([one])])
    assert one._table is None and memory.buffer == {}
    assert torch.equal(one(5), theirs(5))


def test_layers_with_latent_attention_share_a_table_within_their_chunk():
    chunks = [
        torch.nn.ModuleList(
            _bare(MLASelfAttention, rotary_pos_emb=torch.nn.Identity()) for _ in range(2)
        )
        for _ in range(2)
    ]
    attach_edges(chunks, head_tile="off")
    first, second = ([layer.rotary_pos_emb for layer in chunk] for chunk in chunks)
    assert first[0] is first[1] and second[0] is second[1] and first[0] is not second[0]
