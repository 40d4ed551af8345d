"""What Megatron's arguments say of each layer, where layers differ: experts, windows, rotation."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_paradyse.costs.description import (
    EXPERT_PARALLEL,
    EXPERT_TENSOR_PARALLEL,
    HEAD_NORM,
    L2_NORM,
    OUTPUT_GATE,
    ROTARY,
    WINDOW,
)
from megatron_paradyse.costs.layers import ATTENTION, MLP, LayerKinds, half_of, kinds_of, layer_of
from megatron_paradyse.errors import UserError

EXPERTS, WINDOWS, UNROTATED = "moe_layer_freq", "window_attn_skip_freq", "no_rope_freq"
OF_ATTENTION = (WINDOWS, UNROTATED)
# Sizes of latent attention, which rotates in every layer.
OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def num_prediction_layers(args: argparse.Namespace) -> int:
    """Layers of multi-token prediction, which plans count after the decoder's."""
    return 1 if args.mtp_num_layers and args.mtp_use_repeated_layer else args.mtp_num_layers or 0


def count_layers(args: argparse.Namespace) -> int:
    """Of the decoder and of multi-token prediction."""
    return args.num_layers + num_prediction_layers(args)


@dataclass(frozen=True)
class ModelLayers:
    """Layers of a model, by their numbers in it; a number may be there more than once.

    patterns: by argument, 1 for each layer that has what that gives, 0 for the others; without an
    argument that was not given, for then all layers are alike in it. The last num_predicting layers
    are those of multi-token prediction: as Megatron builds them, the i-th has an attention like
    layer i and an MLP like the decoder's last.
    """

    numbers: tuple[int, ...]
    patterns: Mapping[str, tuple[int, ...]]
    num_predicting: int = 0

    @classmethod
    def of_arguments(cls, args: argparse.Namespace, num_layers: int) -> ModelLayers:
        """The first num_layers of the model that the arguments describe, less what multi-token
        prediction has of them, and those; UserError where a list in them has fewer.
        """
        num_predicting = num_prediction_layers(args)
        numbers = tuple(range(1, num_layers - num_predicting + 1))
        given = {}
        if args.num_experts and args.moe_layer_freq != 1:
            given[EXPERTS] = lambda freq, number: (number - 1) % freq == 0
        if args.window_size and args.window_attn_skip_freq is not None:
            given[WINDOWS] = lambda freq, number: number % freq != 0
        if args.no_rope_freq and not args.multi_latent_attention:
            given[UNROTATED] = lambda freq, number: number % freq == 0
        patterns = {}
        for name, has in given.items():
            of = _pattern(args, name, numbers, has)
            first = range(1, num_predicting + 1)  # they may be more than the decoder's
            alike = _pattern(args, name, first, has) if name in OF_ATTENTION else ()
            patterns[name] = of + (alike or of[-1:] * num_predicting)
        return cls(tuple(range(1, num_layers + 1)), patterns, num_predicting)

    def only(self, numbers: Sequence[int], *, predicting: bool = False) -> ModelLayers:
        """A model of these layers, in this order, all in the decoder.

        predicting: multi-token prediction follows them if the model has it, and before it more of
        them where Megatron would otherwise build another one: the decoder's last, and as many as it
        has layers.
        """
        num_predicting = self.num_predicting if predicting else 0
        last, of_mlp = self.num_decoding, self.patterns.get(EXPERTS, ())
        chosen = list(numbers)
        while num_predicting and (
            len(chosen) < num_predicting or (of_mlp and of_mlp[chosen[-1] - 1] != of_mlp[last - 1])
        ):
            chosen.append(last)
        chosen += self.numbers[last:] if num_predicting else ()
        patterns = {
            name: tuple(of[number - 1] for number in chosen) for name, of in self.patterns.items()
        }
        return ModelLayers(tuple(chosen), patterns, num_predicting)

    @property
    def num_decoding(self) -> int:
        """Layers of the decoder."""
        return len(self.numbers) - self.num_predicting

    def kinds(self) -> LayerKinds:
        """Which of the layers, counted from 1, are alike."""
        rows = {name: self.patterns.get(name, (0,) * len(self.numbers)) for name in OF_ATTENTION}
        mlp = self.patterns.get(EXPERTS, (0,) * len(self.numbers))
        return kinds_of(list(zip(*rows.values(), strict=True)), mlp)

    def halves(self, args: argparse.Namespace) -> dict[str, dict[str, int]]:
        """What each kind of attention and MLP has, by its name: see Description."""
        tell = {ATTENTION: self._attention, MLP: self._mlp}
        return {
            name: tell[half_of(name)](args, layer_of(name) - 1) for name in self.kinds().halves()
        }

    def windows(self, args: argparse.Namespace) -> list[int | None]:
        """Of each kind of attention: the keys that a query sees; None: no window hides any."""
        halves = self.halves(args)
        return [has.get(WINDOW) for name, has in halves.items() if half_of(name) == ATTENTION]

    def _attention(self, args: argparse.Namespace, place: int) -> dict[str, int]:
        found = {HEAD_NORM: int(args.qk_layernorm)}
        if args.qk_l2_norm:
            found[L2_NORM] = 1
        if args.attention_output_gate:
            found[OUTPUT_GATE] = 1
        if args.multi_latent_attention:
            found |= {name: getattr(args, name) or 0 for name in OF_LATENTS}
        elif args.position_embedding_type in ROTARY:
            found["rotated"] = 1 - self._has(UNROTATED, place, default=0)
        if args.window_size and self._has(WINDOWS, place, default=1) and args.window_size[0] >= 0:
            found[WINDOW] = args.window_size[0] + 1  # the query's own token is seen too
        return found

    def _mlp(self, args: argparse.Namespace, place: int) -> dict[str, int]:
        if not (args.num_experts and self._has(EXPERTS, place, default=1)):
            return {"experts": 0}
        found = {
            "experts": args.num_experts,
            "experts_per_token": args.moe_router_topk,
            "expert_ffn_size": args.moe_ffn_hidden_size or args.ffn_hidden_size,
            "shared_expert_ffn_size": args.moe_shared_expert_intermediate_size or 0,
        }
        p, parts = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
        if args.expert_model_parallel_size > 1:
            found[EXPERT_PARALLEL] = args.expert_model_parallel_size
        if parts not in (None, p):
            found[EXPERT_TENSOR_PARALLEL] = parts
        return found

    def _has(self, name: str, place: int, *, default: int) -> int:
        return self.patterns[name][place] if name in self.patterns else default

    def put_into(self, args: argparse.Namespace) -> None:
        """Let the arguments describe these layers alone."""
        args.num_layers = args.encoder_num_layers = self.num_decoding
        args.mtp_num_layers = self.num_predicting or None
        for name, pattern in self.patterns.items():
            setattr(args, name, list(pattern[: self.num_decoding]))


def _pattern(
    args: argparse.Namespace, name: str, numbers: Sequence[int], has: Callable[[int, int], bool]
) -> tuple[int, ...]:
    """An argument as Megatron takes it, as a list of 0 and 1: a layer of so many, or that list."""
    freq, flag = getattr(args, name), name.replace("_", "-")
    if isinstance(freq, int):
        if not freq:
            raise UserError(f"--{flag} 0: one layer of how many, 1 or more, or a list")
        return tuple(int(has(freq, number)) for number in numbers)
    # Of experts Megatron would end in a traceback: all of its layers, each 0 or 1.
    too_long = name == EXPERTS and len(freq) > args.num_layers
    if too_long or len(freq) < len(numbers):
        raise UserError(
            f"--{flag} tells of {len(freq)} layers, and there are "
            f"{args.num_layers if too_long else len(numbers)}: give a 0 or 1 for each"
        )
    if name == EXPERTS and not {*freq} <= {0, 1}:
        raise UserError(f"--{flag} {freq}: give a 0 or 1 for each layer")
    return tuple(int(bool(freq[number - 1])) for number in numbers)
