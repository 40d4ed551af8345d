"""The strategies that a cost file has costs of, and which of them plans use unless told."""

from __future__ import annotations

from megatron_paradyse.costs.cost_file import CostFile
from megatron_paradyse.costs.layers import ATTENTION, HALVES, half_of
from megatron_paradyse.costs.model import CostModel
from megatron_paradyse.costs.packed import AS_LOCAL, LOCAL
from megatron_paradyse.costs.table import BYTES_ONLY, OK, CostTable
from megatron_paradyse.errors import UserError
from megatron_paradyse.settings import Settings
from megatron_paradyse.strategies import (
    OFFLOAD,
    RECOMPUTE,
    base_name,
    offloads,
    strategy_names,
)


def known_strategies(model: CostModel) -> tuple[str, ...]:
    """The strategies with all costs that their plans need, of both halves of a layer, those of
    which may be of layers that differ; with a host's rate +offload after +recompute.
    """
    operations = dict.fromkeys(fit.operation for fit in model.fits)
    of_half = {half: [o for o in operations if half_of(o) == half] for half in HALVES}
    names: dict[str, None] = {}
    for fit in model.fits:
        if half_of(fit.operation) == ATTENTION:
            names[fit.strategy] = None
            if fit.strategy.endswith(RECOMPUTE):
                names[base_name(fit.strategy) + OFFLOAD] = None
    return tuple(
        name
        for name in names
        if all(any(model.has(name, o) for o in of_half[half]) for half in HALVES)
    )


def nothing_known(table: CostTable) -> str:
    """That no strategy has all costs, and the first reason that the measurements give."""
    reasons = (
        f": {m.operation} of {m.strategy} at s={m.seq_length:,}: {m.status}"
        for m in table.measurements
        if m.status not in (OK, BYTES_ONLY)
    )
    return "no strategy has costs of both halves of a layer" + next(reasons, "")


def known_for_rows(model: CostModel) -> tuple[str, ...]:
    """known_strategies, and before them local_z where others tell what it costs.

    The first of several that cost the same is planned, and it exchanges least.
    """
    known = known_strategies(model)
    if LOCAL not in strategy_names(packed=True) or model.packed is None:
        return known
    suffixes = ("", RECOMPUTE, OFFLOAD)
    local = [LOCAL + x for x in suffixes if any(name + x in known for name in AS_LOCAL)]
    return tuple(dict.fromkeys((*local, *known)))


def default_strategies(
    settings: Settings, file: CostFile, known: tuple[str, ...]
) -> tuple[str, ...]:
    """All, less +offload if the settings say so, or on a CPU: it has one memory."""
    wanted = settings.offload
    if wanted and not any(map(offloads, known)):
        raise UserError(
            f"offload: true, but {file.path} has no rate of copies to the host, or nothing with "
            "+recompute: profile again, or leave it out"
        )
    if wanted is None:
        wanted = file.table.description.hardware.kind != "cpu"
    return tuple(name for name in known if wanted or not offloads(name))
