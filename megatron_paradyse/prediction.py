"""Megatron's multi-token prediction (--mtp-num-layers), with layers that switch strategies too.

Megatron builds it beside the decoder, of layer specs of its own, and runs it after the decoder on
hidden states and the embeddings of tokens that follow. install() puts this package's parts there.
In plans its layers are those after the decoder's: L + 1, L + 2 and so on.
"""

from __future__ import annotations

import copy
import dataclasses
import functools

import torch
from megatron.core import parallel_state
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.typed_torch import apply_module
from megatron.training.models import gpt as gpt_models
from torch import Tensor

from megatron_paradyse.layer_specs import gpt_layer_spec, norm_for, switchable_layer
from megatron_paradyse.microbatch_params import PlannedMicrobatch, RowParams
from megatron_paradyse.model_edges import TiledOutputLayer
from megatron_paradyse.parameters import add_from_the_start, announce_use, of_strategy
from megatron_paradyse.strategies.zero import gather_weight, zero_linear

_installed = False


def install() -> None:
    """Let models of gpt_layer_spec predict more tokens with switchable layers; others stay."""
    global _installed
    if _installed:
        return
    _installed = True
    gpt_models.mtp_block_spec = _with_switchable_layers(gpt_models.mtp_block_spec)
    multi_token_prediction.roll_tensor = _within_documents(multi_token_prediction.roll_tensor)
    gpt_model.process_mtp_loss = _in_tiles_or_rows(gpt_model.process_mtp_loss)


def _with_switchable_layers(build):
    @functools.wraps(build)
    def mtp_block_spec(config, *args, **kwargs):
        block = build(config, *args, **kwargs)
        if block is None or config.transformer_layer_spec is not gpt_layer_spec:
            return block
        return switchable_prediction(block, config.transformer)

    return mtp_block_spec


def switchable_prediction(
    block: MultiTokenPredictionBlockSubmodules, model
) -> MultiTokenPredictionBlockSubmodules:
    """Of Megatron's spec of multi-token prediction, and its TransformerConfig."""
    layers = [_switchable(spec, model) for spec in block.layer_specs]
    return MultiTokenPredictionBlockSubmodules(layer_specs=layers)


def _switchable(spec: ModuleSpec, model) -> ModuleSpec:
    old = spec.submodules
    submodules = dataclasses.replace(
        old,
        **{name: norm_for(getattr(old, name), model) for name in ("enorm", "hnorm", "layer_norm")},
        mtp_model_layer=switchable_layer(old.mtp_model_layer, model),
    )
    return ModuleSpec(module=PredictionLayer, params=spec.params, submodules=submodules)


class PredictionLayer(MultiTokenPredictionLayer):
    """Megatron's, whose ranks project their own rows of a long sequence.

    Megatron gathers both inputs, [s, b, 2 h] on every rank, computes its channels of all rows, and
    gathers these. With more tokens than channels the weight is what takes fewer bytes: 6 h h of it
    and its gradient are sent in place of 8 s b h, and the whole of it is not more than the inputs.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        attention = self.mtp_model_layer.self_attention
        number = self.config.num_layers + self.layer_number  # Megatron's begins at 1 again
        attention.plan_number = attention.core_attention.plan_number = number
        add_from_the_start(self)

    def _concat_embeddings(self, hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
        """hidden states and embeddings of tokens that follow, both [s/p, b, h] -> [s/p, b, h]."""
        rows, batch_size, h = hidden_states.shape
        p = self.tp_group.size()
        if p == 1 or rows * p * batch_size <= h or InferenceMode.is_active():
            return super()._concat_embeddings(hidden_states, decoder_input)
        both = torch.cat(
            (apply_module(self.enorm)(decoder_input), apply_module(self.hnorm)(hidden_states)), -1
        )
        announce_use(self.eh_proj)
        weight = of_strategy(self.eh_proj.weight, self.config)
        gathering = gather_weight(weight, self.tp_group)
        return zero_linear(both, gathering, weight, None, self.tp_group)


def _within_documents(roll):
    @functools.wraps(roll)
    def roll_tensor(tensor, shifts=-1, dims=-1, cp_group=None, packed_seq_params=None):
        """As Megatron's. In packed rows to the next token of the same document, wherever it is.

        Where documents are padded apart, Megatron's would cut between them as if they were not.
        """
        params = packed_seq_params
        if isinstance(params, PlannedMicrobatch):
            params = params.original
        if tensor is None or not isinstance(params, RowParams):
            if params is not None and params.cu_seqlens_q_padded is not None:
                params = copy.copy(params)
                params.cu_seqlens_q = params.cu_seqlens_q_padded
            return roll(tensor, shifts, dims, cp_group, params)
        assert shifts == dims == -1, (shifts, dims)
        rolled = params.rolled(tensor)
        return rolled, rolled.sum()

    return roll_tensor


def _in_tiles_or_rows(process):
    @functools.wraps(process)
    def process_mtp_loss(**kwargs):
        labels, layer = kwargs["labels"], kwargs["output_layer"]
        if labels is None:
            return process(**kwargs)
        tiled = isinstance(layer, TiledOutputLayer) and layer.takes(labels)
        ours = tiled or isinstance(kwargs.get("packed_seq_params"), RowParams)
        return _process(tiled=tiled, **kwargs) if ours else process(**kwargs)

    return process_mtp_loss


def _process(
    *,
    hidden_states: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None,
    output_layer,
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss,
    config,
    tp_group,
    tiled: bool,
    packed_seq_params=None,
    scale_logits_fn=None,
    **unused,
) -> Tensor:
    """Megatron's losses of the tokens that follow, in tiles without all logits.

    hidden_states [(1 + k) s/p, b, h] of the decoder and of k layers, labels and loss_mask [b, s] ->
    the decoder's, whose gradient brings those of the losses. In packed rows a document's tokens
    weigh what they would in a microbatch of their own.
    """
    k, share = config.mtp_num_layers, config.mtp_loss_scaling_factor / config.mtp_num_layers
    decoder, *predicting = hidden_states.chunk(1 + k)
    if config.mtp_detach_heads:
        output_weight = (output_layer.weight if output_weight is None else output_weight).detach()
    mask = torch.ones_like(labels) if loss_mask is None else loss_mask
    counted = _counted(mask, config, packed_seq_params)  # predicted by the decoder
    for index, hidden in enumerate(predicting):
        labels, _ = multi_token_prediction.roll_tensor(labels, packed_seq_params=packed_seq_params)
        mask, count = multi_token_prediction.roll_tensor(mask, packed_seq_params=packed_seq_params)
        # The gradients of all tokens are divided by their number later, or are means at once.
        weights = mask / count.clamp(min=1)
        if config.calculate_per_token_loss:
            weights = mask * counted / _counted(mask, config, packed_seq_params).clamp(min=1)
        if tiled:
            likeliest = torch.empty_like(labels) if is_training else None
            losses = output_layer(
                hidden, output_weight, labels=labels, loss_mask=weights, predicted=likeliest
            )
        else:
            logits, _ = output_layer(
                hidden, weight=output_weight, runtime_gather_output=runtime_gather_output
            )
            logits = logits if scale_logits_fn is None else scale_logits_fn(logits)
            losses = compute_language_model_loss(labels, logits)
        if is_training:
            if tiled:
                right = ((likeliest == labels) & mask.bool()).sum(), mask.bool().sum()
            else:
                right = multi_token_prediction._compute_mtp_acceptance_counts(
                    logits, labels, mask, output_layer, runtime_gather_output, tp_group
                )
            MTPLossLoggingHelper.save_metrics_to_tracker(
                (mask * losses).sum() / count.clamp(min=1),
                *right,
                index,
                k,
                avg_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            )
        decoder = MTPLossAutoScaler.apply(decoder, share * weights * losses)
    return decoder


def _counted(mask: Tensor, config, packed_seq_params) -> Tensor:
    """How many tokens count: of a packed row those of each token's document, else of all."""
    if config.calculate_per_token_loss and isinstance(packed_seq_params, RowParams):
        return packed_seq_params.sums(mask)
    return mask.sum()
