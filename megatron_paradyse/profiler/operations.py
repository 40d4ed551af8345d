"""What is measured: the parts of the real model, each as a forward from an input of its own.

A part begins at a tensor that a graph above it made and ends where a graph below it begins, as in
training: nothing outside holds its input, its output or a gradient longer than the model would.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.utils import make_viewless_tensor
from megatron.training import get_args
from torch import Tensor
from torch.autograd import Function

from megatron_paradyse.costs.layers import LAYER, half_of
from megatron_paradyse.costs.table import EMBEDDING, HEAD, PREDICTION
from megatron_paradyse.latent_attention import SwitchableLatentAttention
from megatron_paradyse.microbatch_params import PlannedMicrobatch
from megatron_paradyse.model_edges import losses_in_tiles
from megatron_paradyse.packing.row import Row
from megatron_paradyse.plan import uniform_plan
from megatron_paradyse.profiler.model import ProfiledModel
from megatron_paradyse.settings import FIXED
from megatron_paradyse.train.gpt import loss_function, read_batch


@dataclass(frozen=True)
class Operation:
    """make_input() gives the input, or None; forward(input) the output and what else stays."""

    make_input: Callable[[], Tensor | None]
    forward: Callable[[Tensor | None], tuple[Tensor, Any]]


class Source(Function):
    """The end of the graph above: makes a tensor, and drops its gradient when that arrives."""

    @staticmethod
    def forward(ctx, anchor, template):
        return template.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, None


class Sink(Function):
    """The beginning of the graph below: makes the gradient when the backward starts."""

    @staticmethod
    def forward(ctx, output):
        ctx.like = (output.shape, output.dtype, output.device)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        shape, dtype, device = ctx.like
        return torch.full(shape, 1e-3, dtype=dtype, device=device)


class Operations:
    """The operations of a model at one (s, b); read gives a microbatch of the raw one."""

    def __init__(
        self,
        model: ProfiledModel,
        seq_length: int,
        batch_size: int,
        *,
        read: Callable[[Iterator[dict]], dict] = read_batch,
    ):
        self._model, self._read = model, read
        self.size = (seq_length, batch_size)
        args = get_args()
        args.seq_length, args.micro_batch_size = seq_length, batch_size
        self._anchor = torch.zeros((), requires_grad=True)
        self._raw = raw_batch(seq_length, batch_size)
        self._batch = self._read(iter([self._raw]))
        with torch.no_grad():
            self._layer_kwargs = self._until_first_layer(self._batch)
        self._template = self._layer_kwargs.pop("hidden_states").detach().clone()
        if isinstance(model.layer.self_attention, SwitchableLatentAttention):
            model.layer.self_attention.angles(None, seq_length)  # made now, as other models' are

    def get(self, operation: str, strategy: str, row: Row | None = None) -> Operation:
        """The operation under a strategy; those of the model know none.

        row: of packed documents, for an operation of a layer, of as many tokens.
        """
        if operation == EMBEDDING:
            return Operation(lambda: None, self._embed)
        if operation == PREDICTION:
            return Operation(self._input, self._predict)
        if operation == HEAD:
            return Operation(self._inputs, self._head)
        layer, half = self._model.layer_of(operation), half_of(operation)
        plan = uniform_plan([layer.plan_number], strategy)
        planned = dataclasses.replace(self._layer_kwargs["packed_seq_params"], plan=plan)
        if row is not None:
            planned = self._packed(planned, row)
        kwargs = {**self._layer_kwargs, "packed_seq_params": planned}

        def run(x):
            try:
                with _as_in_a_block(self._model.config):
                    if half == LAYER:
                        return layer(hidden_states=x, **kwargs)[0], None
                    return layer.run_half(half, x, kwargs), None
            except Exception:
                layer.mlp_norm_manager = None  # Megatron's, else x stays until the layer's next MLP
                raise

        return Operation(self._input, run)

    def _packed(self, planned: PlannedMicrobatch, row: Row) -> PlannedMicrobatch:
        """With the angles that all layers share."""
        assert self.size == (row.seq_length, 1)
        planned = dataclasses.replace(planned, row=row, documents=(row.documents,))
        table = self._layer_kwargs.get("rotary_pos_emb")
        attention = self._model.layer.self_attention
        if isinstance(attention, SwitchableLatentAttention):
            table, _ = attention.angles(planned, row.seq_length)
        for part in table if isinstance(table, tuple) else (table,):
            if part is not None:
                for by_rows in (False, True):
                    planned.angles(part, by_rows=by_rows)
        return planned

    def _input(self) -> Tensor:
        return Source.apply(self._anchor, self._template)

    def _inputs(self) -> Tensor:
        """Of the head: what each layer of multi-token prediction got, and the last output."""
        return Source.apply(
            self._anchor, torch.cat([self._template] * (1 + self._model.layers.num_predicting))
        )

    def _embed(self, _: Tensor | None) -> tuple[Tensor, Any]:
        """Reads the microbatch too, which stays until its loss is computed."""
        batch = self._read(iter([self._raw]))
        return self._until_first_layer(batch)["hidden_states"], batch

    def _until_first_layer(self, batch: dict) -> dict:
        """What Megatron's block gives its first layer, by keyword."""
        given: dict = {}

        def stop(module, args, kwargs):
            given.update(kwargs)
            raise _FirstLayerReachedError

        handle = self._model.layer.register_forward_pre_hook(stop, with_kwargs=True)
        names = ("tokens", "position_ids", "attention_mask")
        try:
            self._model.chunks[0](
                *(batch[name] for name in names),
                labels=batch["labels"],
                loss_mask=batch["loss_mask"],
            )
        except _FirstLayerReachedError:
            pass
        finally:
            handle.remove()
        return given

    def _predict(self, x: Tensor | None) -> tuple[Tensor, Any]:
        """What the first layer of multi-token prediction does before its own transformer layer."""
        gpt, batch = self._model.gpt, self._batch
        layer = gpt.mtp.layers[0]
        *_, embedded, hidden = layer._get_embeddings(
            batch["tokens"],
            batch["position_ids"],
            gpt.embedding,
            _normed(x, gpt.decoder.final_layernorm),
            self._layer_kwargs["packed_seq_params"],
        )
        with _as_in_a_block(self._model.config):
            return layer._concat_embeddings(hidden, embedded), None

    def _head(self, x: Tensor | None) -> tuple[Tensor, Any]:
        assert x is not None
        gpt, batch = self._model.gpt, self._batch
        norm, hidden = gpt.decoder.final_layernorm, x
        if self._model.layers.num_predicting:
            *normed, last = x.chunk(1 + self._model.layers.num_predicting)
            hidden = torch.cat((*normed, _normed(last, gpt.mtp.layers[-1].final_layernorm)))
        elif norm is not None:
            hidden = _normed(x, norm)
        if isinstance(gpt, BertModel):
            losses = gpt.head(hidden, batch["labels"], batch["loss_mask"])
        else:
            losses = gpt._postprocess(
                hidden_states=hidden,
                input_ids=batch["tokens"],
                position_ids=batch["position_ids"],
                labels=batch["labels"],
                rotary_pos_emb=None,
                rotary_pos_cos=None,
                rotary_pos_sin=None,
                loss_mask=batch["loss_mask"],
                output_processor=losses_in_tiles(gpt, batch["labels"]),
            )
        return loss_function(batch["loss_mask"], losses)[0], None


def _normed(x: Tensor | None, norm) -> Tensor:
    return make_viewless_tensor(inp=norm(x), requires_grad=True, keep_graph=True)


class _FirstLayerReachedError(Exception):
    pass


@contextlib.contextmanager
def _as_in_a_block(config) -> Iterator[None]:
    """The random state that Megatron's block gives its layers."""
    if not config.sequence_parallel:
        yield
        return
    with tensor_parallel.get_cuda_rng_tracker().fork():
        yield


def raw_batch(seq_length: int, batch_size: int) -> dict[str, Tensor]:
    """A microbatch as the data loader gives it, of random tokens without padding."""
    args = get_args()
    generator = torch.Generator().manual_seed(seq_length)
    shape = (batch_size, seq_length + 1)
    text = torch.randint(args.padded_vocab_size, shape, generator=generator)
    if args.paradyse_settings.sequences != FIXED:
        return {"tokens": text, "lengths": torch.full((batch_size,), seq_length)}
    positions = torch.arange(seq_length).expand(batch_size, -1)
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": torch.ones(batch_size, seq_length),
        "position_ids": positions.clamp(max=args.max_position_embeddings - 1).contiguous(),
    }


def tensor_parallel_size() -> int:
    return mpu.get_tensor_model_parallel_world_size()
