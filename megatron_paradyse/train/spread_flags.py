"""Which flags go with documents over several replicas (--paradyse-spread)."""

from __future__ import annotations

import argparse

from megatron_paradyse.errors import UserError
from megatron_paradyse.policy import make_policy
from megatron_paradyse.settings import PACKED
from megatron_paradyse.strategies import check_takes_wide, takes_wide
from megatron_paradyse.train.model_layers import count_layers


def check_spread(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Before Megatron validates them; UserError for what cannot run.

    names: the strategies that plans may name; none where that is still open.
    """
    settings = args.paradyse_settings
    spread = settings.spread
    if spread == 1:
        return
    if settings.sequences != PACKED:
        raise UserError(
            f"--paradyse-spread {spread} with --paradyse-sequences {settings.sequences}: only "
            "packed microbatches lie over several replicas: give --paradyse-sequences packed"
        )
    replicas = args.world_size // (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    )
    if replicas % spread:
        fitting = max(q for q in range(1, spread) if replicas % q == 0)
        raise UserError(
            f"--paradyse-spread {spread} does not divide the {replicas} data-parallel replicas: "
            f"use {fitting}"
        )
    _check_attention(args, names)


def _check_attention(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Some strategy that the policy may choose for attention must run over replicas, or all that
    it always chooses.
    """
    settings = args.paradyse_settings
    if settings.policy.startswith(("fixed:", "plan:")) and args.num_layers:
        plan = make_policy(settings).plan(1, 1, range(1, count_layers(args) + 1))
        for name in sorted({choice.attention for choice in plan.layers.values()}):
            check_takes_wide(name, settings.spread)
    if names and not any(takes_wide(name) for name in names):
        raise UserError(
            f"--paradyse-spread {settings.spread} with {', '.join(names)}, none of which runs "
            "attention over several replicas: allow megatron_cz, which runs any"
        )
