"""The registry of parallel strategies.

Names resolve lazily: asking for the names imports no torch. A package of someone else's adds a
strategy through an entry point of the group `megatron_paradyse.strategies`, whose name is the
strategy's and whose value is `module:OBJECT`, a Strategy.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from megatron_paradyse.errors import UserError

if TYPE_CHECKING:
    from megatron_paradyse.strategies.contract import Strategy

ENTRY_POINT_GROUP = "megatron_paradyse.strategies"
RECOMPUTE = "+recompute"

BUILT_IN = ("megatron_ts", "ulysses_z", "megatron_cz", "colossal_z", "metp")


def strategy_names() -> tuple[str, ...]:
    """Every registered strategy, without modifiers: the built-in ones, then third parties'."""
    return BUILT_IN + tuple(name for name in sorted(_third_party()) if name not in BUILT_IN)


def parse_strategy_name(name: str) -> tuple[str, bool]:
    """ "ulysses_z+recompute" -> ("ulysses_z", True). Raises UserError if there is no such name."""
    base = name.removesuffix(RECOMPUTE)
    if base not in strategy_names():
        raise UserError(
            f"no strategy named {name!r}: use one of {', '.join(strategy_names())}, "
            f"each also with {RECOMPUTE}"
        )
    return base, base != name


@cache
def get_strategy(name: str) -> Strategy:
    """The strategy of that name, wrapped to recompute if it ends in +recompute."""
    base, recompute = parse_strategy_name(name)
    strategy = _load(base)
    if recompute:
        from megatron_paradyse.strategies.recompute import recomputed

        return recomputed(strategy)
    return strategy


def _load(name: str) -> Strategy:
    if name in BUILT_IN:
        return importlib.import_module(f"{__name__}.{name}").STRATEGY
    strategy = _third_party()[name].load()
    if strategy.name != name:
        raise UserError(
            f"entry point {name!r} gives a strategy that calls itself {strategy.name!r}"
        )
    return strategy


@cache
def _third_party() -> dict:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
