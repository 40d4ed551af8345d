"""The registry of parallel strategies.

Names resolve lazily: asking for the names imports no torch. A package of someone else's adds a
strategy through an entry point of the group `megatron_paradyse.strategies`, whose name is the
strategy's and whose value is `module:OBJECT`, a Strategy.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from megatron_paradyse.errors import UserError

if TYPE_CHECKING:
    from megatron_paradyse.strategies.contract import Microbatch, Strategy

ENTRY_POINT_GROUP = "megatron_paradyse.strategies"
RECOMPUTE = "+recompute"
OFFLOAD = "+offload"  # recomputes too; what it keeps waits in host memory

BUILT_IN = ("megatron_ts", "ulysses_z", "megatron_cz", "colossal_z", "metp", "local_z")
PACKED_ONLY = ("local_z",)  # run microbatches of which no document is on two ranks, and no others


def strategy_names(*, packed: bool = False) -> tuple[str, ...]:
    """Every registered strategy, without modifiers: the built-in ones, then third parties'.

    packed: also those of PACKED_ONLY, which are no choice for a single document.
    """
    names = BUILT_IN + tuple(name for name in sorted(_third_party()) if name not in BUILT_IN)
    return tuple(name for name in names if packed or name not in PACKED_ONLY)


def singles(names: Iterable[str]) -> list[str]:
    """Those that run single documents."""
    return [name for name in names if base_name(name) not in PACKED_ONLY]


def takes(name: str, microbatch: Microbatch, p: int) -> bool:
    """Whether the strategy can run the microbatch on p ranks; of a built-in one without torch."""
    base = base_name(name)
    if base in BUILT_IN:
        from megatron_paradyse.strategies.contract import documents_stay

        return base not in PACKED_ONLY or documents_stay(microbatch, p)
    strategy = _load(base)
    return strategy.takes is None or strategy.takes(microbatch, p)


def check_takes(name: str, microbatch: Microbatch, p: int) -> None:
    """UserError unless the strategy can run the microbatch on p ranks."""
    if takes(name, microbatch, p):
        return
    num_documents = sum(map(len, microbatch.documents or ()))
    what = f"{num_documents} packed documents" if num_documents else "a whole sequence"
    why = ", as not every document lies on one rank" if base_name(name) in PACKED_ONLY else ""
    raise UserError(
        f"{name} cannot run {what} of s={microbatch.seq_length} over p={p} ranks{why}: use "
        "megatron_cz, which runs any"
    )


def limited(names: Iterable[str]) -> tuple[str, ...]:
    """Those of other packages that say which microbatches they can run."""
    return tuple(
        name
        for name in names
        if base_name(name) not in BUILT_IN and _load(base_name(name)).takes is not None
    )


def takes_wide(name: str) -> bool:
    """Whether its attention runs over several groups; of a built-in one without torch."""
    base = base_name(name)
    return base not in PACKED_ONLY if base in BUILT_IN else _load(base).takes_wide


def check_takes_wide(name: str, groups: int) -> None:
    """UserError unless its attention runs over so many groups."""
    if not takes_wide(name):
        raise UserError(
            f"{name} cannot run attention over {groups} replicas (--paradyse-spread): use "
            "megatron_cz, which runs any"
        )


def leaving_out(name: str) -> type[Exception]:
    """What leaves the strategy out where costs are made: of another package's code, anything."""
    return UserError if base_name(name) in BUILT_IN else Exception


def shares_mlp(name: str, other: str) -> bool:
    """Whether both, with the same modifier or with none, run an MLP by the same code.

    Those of other packages never do: each may refuse shapes that others run.
    """
    bases = {base_name(name), base_name(other)}
    if not bases <= {*BUILT_IN}:
        return len(bases) == 1
    return len({(one.mlp, one.tiled_mlp) for one in map(_load, bases)}) == 1


def base_name(name: str) -> str:
    """ "ulysses_z+offload" -> "ulysses_z"; the name may be of a strategy that is not there."""
    suffix = OFFLOAD if name.endswith(OFFLOAD) else RECOMPUTE
    return name.removesuffix(suffix)


def recomputes(name: str) -> bool:
    """Whether it keeps its input only, wherever that waits."""
    return name.endswith((RECOMPUTE, OFFLOAD))


def offloads(name: str) -> bool:
    """Whether what it keeps waits in host memory."""
    return name.endswith(OFFLOAD)


def names_of_costs(name: str) -> tuple[str, ...]:
    """The names whose measured costs those of this name are made from."""
    base = base_name(name)
    return (base, base + RECOMPUTE) if recomputes(name) else (base,)


def with_names_of_costs(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each once, and before each those that names_of_costs gives."""
    return tuple(dict.fromkeys(part for name in names for part in (*names_of_costs(name), name)))


def parse_strategy_name(name: str) -> tuple[str, bool]:
    """ "ulysses_z+recompute" -> ("ulysses_z", whether it recomputes), +offload as well.

    Raises UserError if there is no such name.
    """
    base, names = base_name(name), strategy_names(packed=True)
    if base not in names:
        raise UserError(
            f"no strategy named {name!r}: use one of {', '.join(names)}, "
            f"each also with {RECOMPUTE} or {OFFLOAD}"
        )
    return base, base != name


@cache
def get_strategy(name: str) -> Strategy:
    """The strategy of that name, wrapped if it ends in +recompute or +offload."""
    base, recompute = parse_strategy_name(name)
    strategy = _load(base)
    if recompute:
        from megatron_paradyse.strategies.recompute import recomputed

        return recomputed(strategy, offload=offloads(name))
    return strategy


def _load(name: str) -> Strategy:
    if name in BUILT_IN:
        if name in _third_party():
            raise UserError(
                f"entry point {name!r} of the group {ENTRY_POINT_GROUP}: a built-in strategy has "
                f"this name: rename it, or uninstall its package ({_third_party()[name].value})"
            )
        return importlib.import_module(f"{__name__}.{name}").STRATEGY
    from megatron_paradyse.strategies.third_party import load_strategy

    return load_strategy(name, _third_party()[name])


@cache
def _third_party() -> dict:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
