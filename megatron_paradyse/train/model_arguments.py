"""Megatron's arguments that would have built a model, for what reads arguments.

A loop of one's own has a TransformerConfig and a model, and no arguments.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    HeterogeneousTransformerConfig,
)
from megatron.training.arguments import add_megatron_arguments

from megatron_paradyse.errors import UserError
from megatron_paradyse.settings import Settings
from megatron_paradyse.train.model_kind import GPT


def arguments_of(
    model: GPTModel, settings: Settings, *, num_microbatches: int
) -> argparse.Namespace:
    """As Megatron's parser and its validation leave them.

    num_microbatches: of an iteration at most. UserError for what no argument says.
    """
    config = model.config
    _check(config)
    args = add_megatron_arguments(argparse.ArgumentParser()).parse_args([])
    for name, value in vars(config).items():
        if hasattr(args, name):
            setattr(args, name, value)
    own: dict[str, Any] = {
        "paradyse_model": GPT,
        "paradyse_settings": settings,
        "params_dtype": config.params_dtype,
        "num_experts": config.num_moe_experts,
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "swiglu": config.gated_linear_unit,
        "padded_vocab_size": model.vocab_size,
        "position_embedding_type": model.position_embedding_type,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "distributed_backend": torch.distributed.get_backend(mpu.get_tensor_model_parallel_group()),
        "transformer_impl": _implementation(model),
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline_model_parallel_size,
        "data_parallel_size": mpu.get_data_parallel_world_size(),
        "micro_batch_size": 1,
        "global_batch_size": num_microbatches * mpu.get_data_parallel_world_size(),
    }
    for name, value in own.items():
        setattr(args, name, value)
    return args


def _check(config) -> None:
    """UserError for what Megatron has in other arguments than those that are copied."""
    if isinstance(config, HeterogeneousTransformerConfig):
        raise UserError("a HeterogeneousTransformerConfig: plans are of layers of one size")
    if config.cpu_offloading:
        raise UserError("cpu_offloading in the TransformerConfig: strategies with +offload do that")
    if config.quant_recipe is not None:
        raise UserError(
            "quant_recipe in the TransformerConfig: strategies run in float32, bfloat16 and float16"
        )


def _implementation(model: GPTModel) -> str:
    """By what the linears are: specs say it, and a config may say otherwise."""
    layers = model.decoder.layers
    parts = layers[0].self_attention.modules() if layers else ()  # adapters may be around them
    local = not layers or any(isinstance(part, RowParallelLinear) for part in parts)
    return "local" if local else "transformer_engine"
