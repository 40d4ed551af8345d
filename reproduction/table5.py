"""Table 5, simulated: what each component contributes, to the published framework and to ours.

Every framework plans the same documents, sorted. saved_share is what the whole framework saves
until the length at which the other ends, as in the paper; its 95% interval is a bootstrap over
documents: costs are simulated and do not vary, which documents were drawn does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from megatron_paradyse.costs.model import HYBRID
from megatron_paradyse.preview.setup import make_setup
from reproduction import costs
from reproduction.costs import PAPER_SPARSE, UNTILED, ModelCosts
from reproduction.documents import document_lengths, in_order
from reproduction.frameworks import (
    Framework,
    Ran,
    Runner,
    as_published,
    ours,
    until_out_of_memory,
)
from reproduction.names import (
    AS_PUBLISHED,
    FIXED,
    PARADYSE,
    SIMULATED,
    SORTED,
    WITHOUT_HALVES,
    title,
)
from reproduction.tables import TABLE5, of_panels, origin, update_table

RESAMPLES, CONFIDENCE, SEED = 2000, 0.95, 5


def our_frameworks(names: Sequence[str]) -> list[Framework]:
    """The default, then without each of its parts; names: of all strategies with costs."""
    frameworks = [ours()]
    for name in FIXED:
        rest = ",".join(other for other in names if other.partition("+")[0] != name)
        frameworks.append(_ours(f"without {title(name)}", flags={"strategies": rest}))
    return [
        *frameworks,
        _ours("without forest", forest=False),
        _ours("without mixing", flags={"granularity": "sequence"}),
        _ours(WITHOUT_HALVES, flags={"granularity": "layer"}),
        _ours("without recompute", flags={"strategies": ",".join(FIXED)}),
        _ours("without tiles", head=UNTILED),
        _ours("heuristic for optimal", flags={"policy": "heuristic"}),
        _ours("with smoothing", flags={"smoothing": 0.05}),
    ]


def published_frameworks() -> list[Framework]:
    """The framework as published, then without each of its parts."""
    frameworks = [as_published()]
    for name in FIXED:
        rest = ",".join(other for other in FIXED if other != name)
        frameworks.append(_published(f"without {title(name)}", flags={"strategies": rest}))
    return [
        *frameworks,
        _published("without forest", forest=False),
        _published("without smoothing", flags={"policy": "heuristic:no-smoothing"}),
        _published("without mixing", flags={"policy": "heuristic:no-mix"}),
        _published("profiled at few lengths, beyond memory", fit=PAPER_SPARSE),
        _published("with our fit", fit=HYBRID),
    ]


def _ours(change: str, **changes) -> Framework:
    return ours(f"{PARADYSE}: {change}", **changes)


def _published(change: str, **changes) -> Framework:
    return as_published(f"{AS_PUBLISHED}: {change}", **changes)


def run(arguments: argparse.Namespace) -> None:
    """Write table5-simulated.csv; --as-published: only the rows of the published framework."""
    all_costs = costs.simulated_costs(arguments.models)
    rows: list[dict] = []
    for of_model in all_costs.values():
        groups = [published_frameworks()]
        if not arguments.as_published:
            known = make_setup(str(of_model.path()), ours().settings).policies.costs.strategies
            groups.append(our_frameworks(known))
        for frameworks in groups:
            rows += _model_rows(of_model, frameworks, arguments.distributions)
        print(f"table 5: {of_model.model} simulated", file=sys.stderr)
    made = {row["framework"] for row in rows}
    in_panels = of_panels(arguments.models, arguments.distributions)
    update_table(
        arguments.output / "table5-simulated.csv",
        TABLE5,
        rows,
        made=origin(SIMULATED, costs.HARDWARE),
        replaces=lambda r: in_panels(r) and r["framework"] in made,
    )


def _model_rows(of_model: ModelCosts, frameworks: list[Framework], distributions) -> list[dict]:
    """The first framework is the whole one."""
    documents = {name: in_order(document_lengths(name), SORTED) for name in distributions}
    full: dict[str, list[Ran]] = {}
    rows = []
    for framework in frameworks:
        runner = Runner(of_model, framework)
        limit = runner.longest_tokens()
        for name, lengths in documents.items():
            done = until_out_of_memory(runner.run(lengths))
            # Wrong costs may fail before the longest that fits: a training ends there.
            ended = limit if len(done) == len(lengths) else min(limit, int(lengths[len(done)]) - 1)
            rows.append(
                {
                    "model": of_model.model,
                    "distribution": name,
                    "framework": framework.name,
                    "max_tokens": ended,
                    **contribution(full.setdefault(name, done), done),
                }
            )
    return rows


def contribution(full: Sequence[Ran], other: Sequence[Ran]) -> dict[str, float | None]:
    """What the whole framework saves over another until the first of the two ends."""
    count = min(len(full), len(other))
    if not count:
        return dict.fromkeys(TABLE5[4:], None)
    seconds = np.array([[a.seconds, b.seconds] for a, b in zip(full, other, strict=False)])
    whole, without = seconds.sum(axis=0)
    drawn = np.random.default_rng(SEED).integers(count, size=(RESAMPLES, count))
    sums = seconds[drawn].sum(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(1 - sums[:, 0] / sums[:, 1], [tail, 1 - tail])
    return {
        "cumulative_seconds": float(without),
        "full_seconds_to_same_length": float(whole),
        "saved_share": float(1 - whole / without),
        "ci_low": float(low),
        "ci_high": float(high),
    }
