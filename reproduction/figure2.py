"""Figure 2, simulated: cumulative time against sequence length, and the headlines that follow."""

from __future__ import annotations

import argparse
import sys

from reproduction import authors_fits, costs, headlines
from reproduction.names import AS_PUBLISHED, PARADYSE, POLICIES, SIMULATED
from reproduction.panels import figure2_rows, simulate_panel
from reproduction.tables import FIGURE2, origin, update_table


def run(arguments: argparse.Namespace) -> None:
    """Write figure2-, headlines-, crossovers- and check-simulated.csv; exits where the check fails.

    With --as-published only the rows of the framework as published; the other files always have
    both.
    """
    policies = (AS_PUBLISHED,) if arguments.as_published else POLICIES
    all_costs = costs.simulated_costs(arguments.models)
    rows: list[dict] = []
    summary: dict[str, list[dict]] = {"headlines": [], "check": [], "crossovers": []}
    for model, of_model in all_costs.items():
        limits = headlines.find_limits(of_model)
        panels = [simulate_panel(of_model, name) for name in arguments.distributions]
        for panel in panels:
            rows += figure2_rows(panel, policies)
            summary["headlines"] += headlines.headline_rows(panel, limits)
        documents = {tokens for panel in panels for tokens in panel.tokens}
        summary["check"] += headlines.check_rows(of_model, limits, documents)
        summary["crossovers"] += headlines.crossover_rows(of_model, limits)
        print(f"figure 2: {model} simulated", file=sys.stderr)
    _write(arguments, policies, rows, summary)
    if "bert" in arguments.models:
        update_table(
            arguments.output / "authors_fits.csv",
            authors_fits.COLUMNS,
            authors_fits.fits_rows(arguments.distributions),
            made=authors_fits.SOURCE,
            replaces=lambda r: r["distribution"] in arguments.distributions,
        )
    _assert(summary["check"])


def _write(arguments, policies, rows: list[dict], summary: dict[str, list[dict]]) -> None:
    made = origin(SIMULATED, costs.HARDWARE)
    panels = {(m, d) for m in arguments.models for d in arguments.distributions}
    update_table(
        arguments.output / "figure2-simulated.csv",
        FIGURE2,
        rows,
        made=made,
        replaces=lambda r: (r["model"], r["distribution"]) in panels and r["policy"] in policies,
    )
    for name, columns in (
        ("headlines", headlines.HEADLINES),
        ("check", headlines.CHECK),
        ("crossovers", headlines.CROSSOVERS),
    ):
        update_table(
            arguments.output / f"{name}-simulated.csv",
            columns,
            summary[name],
            made=made,
            replaces=lambda r: (
                r["model"] in arguments.models
                and r.get("distribution") in (None, *arguments.distributions)
            ),
        )


def _assert(rows: list[dict]) -> None:
    """The claim that must hold: ParaDySe is never behind the best single strategy that fits."""
    for row in rows:
        print(
            f"{row['model']} {row['framework']}: slower than the best single strategy of "
            f"{row['among']} that fits at {row['slower']} of {row['lengths']} lengths (worst "
            f"{row['worst_ratio']:.3f} times), does not fit where one does at {row['not_fitting']}"
        )
    if any(r["slower"] or r["not_fitting"] for r in rows if r["framework"] == PARADYSE):
        raise SystemExit("ParaDySe is behind a single strategy: see the lines above")
