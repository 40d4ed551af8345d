"""Modules of a layer whose parameters strategies read without calling them, as attach finds them.

What such a module computes besides, of its own or by hooks, would silently be left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.models.gpt import GPTModel

from megatron_paradyse.attention import SwitchableAttention
from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import MEGATRON_TS
from megatron_paradyse.strategies import base_name
from megatron_paradyse.submodules import SwitchableLayer, SwitchableMLP

# A TransformerEngine's linear may hold the norm before it.
OF_A_LINEAR = ("weight", "bias", "layer_norm_weight", "layer_norm_bias")
BESIDES_LINEARS = ("core_attention", "q_layernorm", "k_layernorm", "kv_layernorm")
# What strategies compute is what the modules of these packages do.
KNOWN = ("megatron.core", "megatron_paradyse", "torch.nn.modules", "transformer_engine", "apex")
# Its pre-hooks wait for parameters, and strategies run them (parameters.announce_use).
OF_MEGATRONS_DDP = "megatron.core.distributed.distributed_data_parallel"


def check_layers(chunk: GPTModel, strategies: tuple[str, ...]) -> None:
    """UserError where a layer cannot switch, or has parts that one of the strategies passes by."""
    others = [name for name in strategies if base_name(name) != MEGATRON_TS]
    layers = list(chunk.decoder.layers)
    if getattr(chunk, "mtp_process", False):
        layers += [layer.mtp_model_layer for layer in chunk.mtp.layers]
    for layer in layers:
        if not isinstance(layer, SwitchableLayer):
            raise UserError(
                f"a layer is a {type(layer).__name__}, which cannot switch: build the model with "
                "switchable_spec(spec, config)"
            )
        _check_halves(layer, others)
        for name, part in _parts(layer) if others else ():
            more = _more_than_megatrons(name, part)
            if more is not None:
                raise UserError(
                    f"{name} is a {type(part).__name__} {more}, as of an adapter, which "
                    f"{others[0]} would pass by: use policy fixed:megatron_ts"
                )


def _check_halves(layer: SwitchableLayer, others: list[str]) -> None:
    """UserError where another module is around one: what it holds would never switch."""
    around = {}
    if not isinstance(layer.self_attention, SwitchableAttention):
        around["self_attention"] = layer.self_attention
    mlp = layer.mlp
    held = any(isinstance(part, SwitchableMLP) for part in mlp.modules())
    if others and held and not isinstance(mlp, SwitchableMLP):
        around["mlp"] = mlp
    for name, part in around.items():
        raise UserError(
            f"{name} is a {type(part).__name__}, which cannot switch: leave Megatron's in its "
            "place, and change what it returns by a forward hook on it"
        )


def _parts(layer: SwitchableLayer) -> Iterator[tuple[str, torch.nn.Module]]:
    """Latent attention has others than self-attention."""
    halves = [layer.self_attention]
    if isinstance(layer.mlp, SwitchableMLP):
        halves.append(layer.mlp)
    for half in halves:
        for name, part in half.named_children():
            if name.startswith("linear_") or name in BESIDES_LINEARS:
                yield name, part


def _more_than_megatrons(name: str, part: torch.nn.Module) -> str | None:
    """What it computes besides what Megatron's would: those who read it would not know of it."""
    if name not in BESIDES_LINEARS:
        if "weight" not in part._parameters:
            return "without a weight of its own"
        more = next((one for one, _ in part.named_parameters() if one not in OF_A_LINEAR), None)
        if more is not None:
            return f"with {more} besides its weight"
    if "forward" in vars(part) or not _of(KNOWN, _where_forward_is(type(part))):
        return "with a forward of its own"
    if part._forward_hooks:
        return "with a forward hook"
    if any(not _of((OF_MEGATRONS_DDP,), hook) for hook in part._forward_pre_hooks.values()):
        return "with a forward pre-hook"
    return "with a backward hook" if part._backward_hooks or part._backward_pre_hooks else None


def _where_forward_is(kind: type) -> type:
    return next(one for one in kind.__mro__ if "forward" in vars(one))


def _of(packages: tuple[str, ...], written) -> bool:
    """Whether a class or function is written in one of these packages."""
    place = f"{getattr(written, '__module__', None)}."
    return place.startswith(tuple(f"{package}." for package in packages))
