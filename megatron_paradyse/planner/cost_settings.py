"""What the settings of a policy by cost name: its cost file, and the strategies of its plans."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_paradyse.costs.cost_file import CostFile, read_cost_file
from megatron_paradyse.errors import UserError
from megatron_paradyse.planner.known import (
    default_strategies,
    known_for_rows,
    known_strategies,
    nothing_known,
)
from megatron_paradyse.policy import POLICIES, cost_policy_kind
from megatron_paradyse.settings import PACKED, Settings
from megatron_paradyse.strategies import names_of_costs, offloads, parse_strategy_name

# Parts of Algorithm 1 that heuristic:no-PART leaves out.
ABLATIONS = ("prune", "short-circuit", "mix", "early-termination", "cache", "smoothing")


@dataclass(frozen=True)
class Costs:
    """A cost file, and the strategies that plans may name.

    strategies: of any layer; default: of the layers for which the settings name none.
    """

    file: CostFile
    strategies: tuple[str, ...]
    default: tuple[str, ...]


def read_costs(settings: Settings, *, packed: bool | None = None) -> Costs:
    """The cost file that the settings name; UserError if there is none or it lacks a strategy.

    packed: whether plans are of packed rows; None: as the settings say.
    """
    check_policy(settings)
    if settings.cost_model is None:
        raise UserError(
            f"--paradyse-policy {settings.policy} needs costs: make a file with megatron-paradyse "
            "profile and fit, and give it as --paradyse-cost-model FILE"
        )
    file = read_cost_file(settings.cost_model)
    model = file.require_model()
    packed = settings.sequences == PACKED if packed is None else packed
    known = known_for_rows(model) if packed else known_strategies(model)
    default = settings.strategies or default_strategies(settings, file, known)
    names = default
    for restriction in (settings.layers or {}).values():
        names += restriction.attention + restriction.mlp
    names = tuple(dict.fromkeys(names))
    for name in names:
        parse_strategy_name(name)
        if name not in known:
            raise _without_costs(name, known, settings.cost_model)
    if not names:
        raise UserError(f"{settings.cost_model}: {nothing_known(file.table)}: profile again")
    if settings.host_memory is not None and not any(map(offloads, names)):
        raise UserError(_host_memory_unused(settings, any(map(offloads, known))))
    return Costs(file, names, tuple(dict.fromkeys(default)))


def _host_memory_unused(settings: Settings, known: bool) -> str:
    """known: whether the costs know of strategies that would use it."""
    why, remedy = f"{settings.cost_model} has no costs of any", "profile with +recompute on a GPU"
    if known:
        why = "no plan may name any"
        remedy = "set offload: true, or name one among the strategies"
    return (
        f"host memory of {settings.host_memory} has no effect without strategies that keep inputs "
        f"there (+offload), and {why}: leave it out, or {remedy}"
    )


def _without_costs(name: str, known: tuple[str, ...], path: str) -> UserError:
    lacks = next((part for part in names_of_costs(name) if part not in known), name)
    why, what = "", "it"
    if lacks != name:
        why = f", which {name} needs"
    elif offloads(name):
        why, what = ", nor a rate of copies to the host", "again"
    choice = ", ".join(known)
    return UserError(
        f"{path} has no costs of {lacks}{why}: profile {what}, or choose among {choice}"
    )


def check_policy(settings: Settings) -> None:
    """UserError for parts that a policy by cost does not have, and for unknown strategies."""
    ablations(settings)
    if settings.mixing_gain is not None and cost_policy_kind(settings) == "heuristic":
        raise UserError(
            "--paradyse-mixing-gain has no effect with --paradyse-policy heuristic, which mixes by "
            "Algorithm 1: leave it out, or use optimal"
        )
    for name in settings.strategies or ():
        parse_strategy_name(name)


def ablations(settings: Settings) -> set[str]:
    """heuristic:no-prune,no-mix -> {"prune", "mix"}; UserError for others."""
    kind, _, argument = settings.policy.partition(":")
    off = {part.strip().removeprefix("no-") for part in argument.split(",") if part.strip()}
    unknown = sorted(off - set(ABLATIONS))
    if kind == "optimal" and argument:
        raise UserError(f"unknown policy {settings.policy!r}: use {POLICIES}")
    if unknown:
        raise UserError(
            f"unknown policy {settings.policy!r}: heuristic takes "
            f"{', '.join(f'no-{name}' for name in ABLATIONS)}"
        )
    return off
