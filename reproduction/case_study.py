"""The case study, simulated: what changing strategy costs where every change is a restart.

Nothing restarts here: the paper's 31 s a restart, times the changes that the best single strategy
of each document makes on the simulated documents, beside the seconds that these train.
"""

from __future__ import annotations

import argparse
import itertools

from reproduction import costs, published
from reproduction.documents import document_lengths, in_order
from reproduction.frameworks import FixedRunner, Runner, ours
from reproduction.names import FIXED, ORDERS, SIMULATED
from reproduction.tables import of_panels, origin, update_table

COLUMNS = (
    *("model", "distribution", "order", "documents", "changes"),
    *("restart_seconds", "training_seconds", "paradyse_seconds"),
)


def run(arguments: argparse.Namespace) -> None:
    """Write case_study-simulated.csv."""
    rows = [
        row
        for of_model in costs.simulated_costs(arguments.models).values()
        for distribution in arguments.distributions
        for row in panel_rows(of_model, distribution)
    ]
    update_table(
        arguments.output / "case_study-simulated.csv",
        COLUMNS,
        rows,
        made=origin(SIMULATED, costs.HARDWARE),
        replaces=of_panels(arguments.models, arguments.distributions),
    )


def panel_rows(of_model: costs.ModelCosts, distribution: str) -> list[dict]:
    """By order: documents that one of the five strategies fits, each run by the fastest."""
    fixed, paradyse = FixedRunner(of_model), Runner(of_model, ours())
    best: dict[int, tuple[float, str]] = {}
    for tokens in sorted({int(t) for t in document_lengths(distribution)}):
        alone = fixed.run(tokens)
        fitting = [(taken, n) for n in FIXED if (taken := alone[n].seconds) is not None]
        if fitting:
            best[tokens] = min(fitting)
    seconds: dict[int, float] = {}
    for ran in paradyse.run(best):
        assert ran.seconds is not None, "where one strategy fits, a plan does"
        seconds[ran.tokens] = ran.seconds
    rows = []
    for order in ORDERS:
        lengths = [int(t) for t in in_order(document_lengths(distribution), order)]
        lengths = [t for t in lengths if t in best]
        names = [best[t][1] for t in lengths]
        changes = sum(a != b for a, b in itertools.pairwise(names))
        rows.append(
            {
                "model": of_model.model,
                "distribution": distribution,
                "order": order,
                "documents": len(lengths),
                "changes": changes,
                "restart_seconds": changes * published.RESTART_TOTAL_SECONDS,
                "training_seconds": sum(best[t][0] for t in lengths),
                "paradyse_seconds": sum(seconds[t] for t in lengths),
            }
        )
    return rows
