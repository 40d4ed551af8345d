"""Panels of figure 2, simulated: every policy on the documents of one model and distribution."""

from __future__ import annotations

from dataclasses import dataclass

from reproduction.costs import UNTILED, ModelCosts
from reproduction.documents import document_lengths, in_order
from reproduction.frameworks import FixedRunner, Ran, Runner, as_published, ours
from reproduction.names import AS_PUBLISHED, FIXED, PARADYSE, SHUFFLED, SORTED


@dataclass(frozen=True)
class Panel:
    """What each policy takes for each document, from short to long.

    tiled, untiled: single strategies with either head, those with +recompute too; published: the
    framework as published, in both orders, because it smooths.
    """

    model: str
    distribution: str
    tiled: dict[str, list[Ran]]
    untiled: dict[str, list[Ran]]
    paradyse: list[Ran]
    published: dict[str, list[Ran]]

    @property
    def tokens(self) -> list[int]:
        return [ran.tokens for ran in self.paradyse]


def simulate_panel(costs: ModelCosts, distribution: str) -> Panel:
    lengths = document_lengths(distribution)
    ordered = {order: in_order(lengths, order) for order in (SORTED, SHUFFLED)}
    published = Runner(costs, as_published())
    return Panel(
        costs.model,
        distribution,
        _fixed(FixedRunner(costs), ordered[SORTED]),
        _fixed(FixedRunner(costs, UNTILED), ordered[SORTED]),
        list(Runner(costs, ours()).run(ordered[SORTED])),
        {order: list(published.run(lengths)) for order, lengths in ordered.items()},
    )


def _fixed(runner: FixedRunner, lengths) -> dict[str, list[Ran]]:
    ran = [runner.run(int(tokens)) for tokens in lengths]
    return {name: [one[name] for one in ran] for name in ran[0]}


def figure2_rows(panel: Panel, policies: tuple[str, ...]) -> list[dict[str, object]]:
    """Rows of figure2-simulated.csv.

    Shuffled rows only of the framework as published: what others take depends on the tokens alone.
    """
    rows: list[dict[str, object]] = []
    for policy in policies:
        if policy == AS_PUBLISHED:
            runs = panel.published
        elif policy == PARADYSE:
            runs = {SORTED: panel.paradyse}
        else:
            assert policy in FIXED
            runs = {SORTED: panel.tiled[policy]}
        for order, ran in runs.items():
            rows += [_row(panel, order, policy, i, one) for i, one in enumerate(ran)]
    return rows


def _row(panel: Panel, order: str, policy: str, document: int, ran: Ran) -> dict[str, object]:
    return {
        "model": panel.model,
        "distribution": panel.distribution,
        "order": order,
        "policy": policy,
        "document": document,
        "tokens": ran.tokens,
        "seconds": ran.seconds,
        "peak_bytes": ran.peak_bytes,
        "plan": ran.plan,
    }
