"""Whether the strategies that the policy may choose can run the model that the flags describe."""

from __future__ import annotations

import argparse
import dataclasses

import torch

from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import MEGATRON_TS
from megatron_paradyse.planner.cost_settings import check_policy, read_costs
from megatron_paradyse.policy import PlanFilePolicy, RandomPolicy, cost_policy_kind, make_policy
from megatron_paradyse.settings import BY_COST, WITHOUT_FLAG, Settings
from megatron_paradyse.strategies import RECOMPUTE, get_strategy, parse_strategy_name
from megatron_paradyse.strategies.contract import AttentionShape
from megatron_paradyse.strategies.marks import check_heeds
from megatron_paradyse.train.model_flags import check_costs_know
from megatron_paradyse.train.model_kind import GPT
from megatron_paradyse.train.model_layers import EXPERTS, ModelLayers, count_layers
from megatron_paradyse.units import parse_bytes


def check_strategies(args: argparse.Namespace) -> tuple[str, ...]:
    """Every strategy that the policy may choose must be able to run this model on p ranks.

    Returns these; none where that is still open.
    """
    heads = args.num_attention_heads
    if not heads:
        return ()  # Megatron says that it is missing
    shape = AttentionShape(
        num_heads=heads,
        num_kv_heads=args.num_query_groups if args.group_query_attention else heads,
        head_dim=args.kv_channels or args.hidden_size // heads,
        causal=args.paradyse_model == GPT,
        softmax_scale=1.0,
        output_gate=args.attention_output_gate,
    )
    settings = args.paradyse_settings
    names = _strategies_of_policy(args, settings)
    if cost_policy_kind(settings) and args.recompute_granularity == "full":
        raise UserError(
            f"--recompute-granularity full with --paradyse-policy {settings.policy}, whose plans "
            "say what is recomputed: leave --recompute-granularity out"
        )
    for name in names:
        strategy = get_strategy(name)
        strategy.check(shape, args.tensor_model_parallel_size)
        check_heeds(
            strategy,
            offset=args.softmax_type != "vanilla",
            latents=args.multi_latent_attention,
            gate=args.attention_output_gate,
        )
    others = [name for name in names if parse_strategy_name(name)[0] != MEGATRON_TS]
    problem = only_megatron_ts(args) or _only_megatrons_mlp(args)
    if problem is not None and others:
        raise UserError(
            f"{problem} does not run with {others[0]}: use --paradyse-policy fixed:megatron_ts"
        )
    _check_beside_experts(args)
    if problem is not None and not names:  # costs of our own choosing
        names = (MEGATRON_TS, MEGATRON_TS + RECOMPUTE)
        args.paradyse_settings = dataclasses.replace(settings, strategies=names)
    return names


def only_megatron_ts(args: argparse.Namespace) -> str | None:
    """The flag whose attention no other strategy can run, if there is one."""
    if args.position_embedding_type not in ("learned_absolute", "rope", "yarn", "none"):
        return f"--position-embedding-type {args.position_embedding_type}"
    for name in ("batch_invariant_mode", "use_kitchen_attention"):
        if getattr(args, name, False):
            return "--" + name.replace("_", "-")
    return None


def _only_megatrons_mlp(args: argparse.Namespace) -> str | None:
    """The flag whose activation no other strategy computes; experts stay Megatron's anyway."""
    return None if args.num_experts else _activation(args)


def _activation(args: argparse.Namespace) -> str | None:
    if args.activation_func_clamp_value is not None:
        return f"--activation-func-clamp-value {args.activation_func_clamp_value}"
    return f"--glu-linear-offset {args.glu_linear_offset}" if args.glu_linear_offset else None


def _check_beside_experts(args: argparse.Namespace) -> None:
    """UserError where a plan would give such an activation, of a layer without experts among those
    with some, to another strategy. Plans by cost do not: a profile finds that it cannot run.
    """
    settings, flag = args.paradyse_settings, _activation(args)
    if flag is None or not args.num_experts or not args.num_layers or cost_policy_kind(settings):
        return
    layers = ModelLayers.of_arguments(args, count_layers(args))
    experts = layers.patterns.get(EXPERTS, (1,) * len(layers.numbers))
    policy = make_policy(settings)
    for number, has in zip(layers.numbers, experts, strict=True):
        names: tuple[str, ...] = policy.strategies
        if not isinstance(policy, RandomPolicy):
            names = (policy.plan(1, 1, [number])[number].mlp,)
        others = [name for name in names if parse_strategy_name(name)[0] != MEGATRON_TS]
        if not has and others:
            raise UserError(
                f"{flag} does not run with {others[0]} in the MLP of layer {number}, which has no "
                "experts: use --paradyse-policy fixed:megatron_ts, or a plan file that does"
            )


def _strategies_of_policy(args: argparse.Namespace, settings: Settings) -> tuple[str, ...]:
    """Every strategy that a plan may name; settings that the policy does not read are refused."""
    if settings.memory_budget is not None:
        parse_bytes(settings.memory_budget)
    if cost_policy_kind(settings):
        check_costs_know(args)
    if cost_policy_kind(settings) and settings.cost_model is None:
        check_policy(settings)
        return settings.strategies or ()
    if cost_policy_kind(settings):
        return read_costs(settings).strategies
    policy = make_policy(settings)
    ineffective = [name for name in BY_COST if getattr(settings, name) != getattr(Settings, name)]
    if settings.memory_budget is not None and torch.cuda.is_available():
        ineffective.append("memory_budget")
    if ineffective:
        raise UserError(
            f"{_flag_of(settings, ineffective[0])} has no effect with --paradyse-policy "
            f"{settings.policy}, which does not choose by cost: leave it out"
        )
    if settings.strategies is not None and not isinstance(policy, RandomPolicy):
        raise UserError(
            f"--paradyse-strategies has no effect with --paradyse-policy {settings.policy}, which "
            "names what runs: leave it out"
        )
    if isinstance(policy, PlanFilePolicy) and args.num_layers:
        policy.check_layers(count_layers(args))
    return policy.strategies


def _flag_of(settings: Settings, name: str) -> str:
    """What a user has written to set it."""
    if name in WITHOUT_FLAG:
        return name
    return f"--paradyse-{'no-' if getattr(settings, name) is False else ''}{name.replace('_', '-')}"
