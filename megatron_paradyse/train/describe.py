"""The description of a profile: the model as its arguments say, the grid, the machine."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
from typing import Any

import torch

from megatron_paradyse.costs.description import (
    HALVES_KEY,
    OTHER_LAYERS,
    Description,
    Hardware,
    ModelShape,
    tile_text,
)
from megatron_paradyse.machine import cpu_name, system_memory_bytes
from megatron_paradyse.strategies.contract import LatentSizes
from megatron_paradyse.strategies.kernels import TILED, Kernel, choose_kernel
from megatron_paradyse.train.batch import device_of_rank
from megatron_paradyse.train.megatron_version import megatron_version
from megatron_paradyse.train.model_flags import check_costs_know
from megatron_paradyse.train.model_kind import MASKS
from megatron_paradyse.train.model_layers import ModelLayers


def describe(args: argparse.Namespace, num_layers: int) -> Description:
    """Of Megatron's arguments, for a model of num_layers (model_layers.count_layers)."""
    model = model_shape(args, num_layers)
    return Description(
        model=model,
        p=args.tensor_model_parallel_size,
        dtype=_dtype(args),
        attention_mask=MASKS[args.paradyse_model],
        attention_kernel=f"{args.transformer_impl}, {_name(args.attention_backend)}",
        hardware=hardware(),
        interconnect=args.distributed_backend,
        versions=versions(),
        source="measured",
        date=datetime.date.today().isoformat(),
        tiled_scores=attention_kernel(args, window=False, dropout=True) is TILED,
        **told_options(args, model),
    )


def told_options(args: argparse.Namespace, model: ModelShape) -> dict[str, Any]:
    """What else costs depend on: OF_MODEL and OTHER_LAYERS."""
    check_costs_know(args)
    window = args.window_size
    which = "some" if args.window_attn_skip_freq else "all"
    layers = ModelLayers.of_arguments(args, model.num_layers)
    return {
        "head_tile": tile_text(
            args.paradyse_settings.head_tile,
            model,
            p=args.tensor_model_parallel_size,
            dtype=_dtype(args),
        ),
        "num_experts": args.num_experts or 0,
        "attention_dropout": args.attention_dropout > 0,
        "hidden_dropout": args.hidden_dropout > 0,
        "mtp_num_layers": layers.num_predicting,
        "attention_window": "none" if window is None else f"{tuple(window)} of {which} layers",
        HALVES_KEY: layers.halves(args),
        OTHER_LAYERS: layers.kinds().others,
    }


def attention_kernel(args: argparse.Namespace, *, window: bool, dropout: bool) -> Kernel:
    """Of the strategies' own attention, on this rank's device."""
    queries = torch.empty(1, head_dim(args), dtype=args.params_dtype, device=device_of_rank())
    return choose_kernel(queries, window=window, dropout=dropout)


def _dtype(args: argparse.Namespace) -> str:
    return str(args.params_dtype).removeprefix("torch.")


def model_shape(args: argparse.Namespace, num_layers: int) -> ModelShape:
    """The shape that the arguments describe, with that many layers."""
    heads = args.num_attention_heads
    return ModelShape(
        num_layers=num_layers,
        hidden_size=args.hidden_size,
        num_heads=heads,
        num_kv_heads=args.num_query_groups if args.group_query_attention else heads,
        head_dim=head_dim(args),
        ffn_size=args.ffn_hidden_size,
        gated=bool(args.swiglu or args.quick_geglu),
        vocab_size=args.padded_vocab_size,
        normalization=args.normalization.lower(),
        biases=bool(args.add_bias_linear),
        position_embedding=args.position_embedding_type.removesuffix("_absolute"),
    )


def head_dim(args: argparse.Namespace) -> int:
    """Of a latent attention that of the widest of query and value, as strategies have both."""
    if not args.multi_latent_attention:
        return args.kv_channels
    sizes = LatentSizes(
        keys=args.kv_lora_rank,
        content=args.qk_head_dim,
        positions=args.qk_pos_emb_head_dim,
        value=args.v_head_dim,
    )
    return sizes.head_dim


def _name(value: object) -> str:
    return getattr(value, "name", str(value))


def hardware() -> Hardware:
    """A rank's device; of a CPU, its share of the machine's memory."""
    world = torch.distributed.get_world_size()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Hardware(
            name=properties.name,
            kind="cuda",
            memory_bytes=properties.total_memory,
            num_devices=world,
        )
    name = f"{cpu_name()}, {os.cpu_count()} cores"
    return Hardware(
        name=name, kind="cpu", memory_bytes=system_memory_bytes() // world, num_devices=world
    )


def versions() -> dict[str, str]:
    """Of packages as installed; of Megatron as it would be imported, from a checkout too."""
    found = {"python": platform.python_version()}
    for name in ("torch", "megatron-core", "transformer-engine", "flash-attn"):
        if name == "megatron-core":
            found |= {name: megatron_version() or "unknown"}
            continue
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
