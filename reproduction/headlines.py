"""The paper's headline numbers from a panel: less time at equal documents, longer sequences; and
whether ParaDySe is ever behind the best single strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_paradyse.strategies import RECOMPUTE
from reproduction.costs import TILED, UNTILED, ModelCosts
from reproduction.frameworks import MOST_TOKENS, FixedRunner, Ran, Runner, as_published, ours
from reproduction.frameworks import until_out_of_memory as trained
from reproduction.names import AS_PUBLISHED, FIXED, PARADYSE, SORTED
from reproduction.panels import Panel

HEADLINES = (
    *("model", "distribution", "framework", "head", "against", "documents", "seconds_against"),
    *("seconds", "reduction", "longest_against", "longest", "limit_against", "limit", "extension"),
)
CHECK = ("model", "framework", "among", "lengths", "slower", "worst_ratio", "not_fitting")
CROSSOVERS = ("model", "head", "memory", "from_tokens", "to_tokens", "fastest")
SHORTEST, SPACING = 512, 1.02  # of the lengths at which strategies are compared
ROUNDING = 1e-9


@dataclass(frozen=True)
class Limits:
    """The longest sequence of each single strategy by head, and of both frameworks."""

    single: dict[str, dict[str, int]]
    frameworks: dict[str, int]


def find_limits(costs: ModelCosts) -> Limits:
    """By preview/longest.py, as `megatron-paradyse max-length` finds them."""
    from megatron_paradyse.preview.longest import find_longest

    single, frameworks = {}, {}
    for head in (TILED, UNTILED):
        found = find_longest(FixedRunner(costs, head).setup)
        single[head] = {limit.strategy: limit.tokens for limit in found.single}
        if head == TILED:
            frameworks[PARADYSE] = found.paradyse.tokens
    frameworks[AS_PUBLISHED] = Runner(costs, as_published()).longest_tokens()
    return Limits(single, frameworks)


def headline_rows(panel: Panel, limits: Limits) -> list[dict[str, object]]:
    """Ours against the ten single strategies, the published framework against the five."""
    rows = []
    published = panel.published[SORTED]
    for framework, ran, head, fixed in (
        (PARADYSE, panel.paradyse, TILED, panel.tiled),
        (AS_PUBLISHED, published, UNTILED, {name: panel.untiled[name] for name in FIXED}),
    ):
        for name, against in fixed.items():
            values = _compared(trained(ran), trained(against))
            limit, other = limits.frameworks[framework], limits.single[head][name]
            rows.append(
                {
                    "model": panel.model,
                    "distribution": panel.distribution,
                    "framework": framework,
                    "head": head,
                    "against": name,
                    **values,
                    "limit_against": other,
                    "limit": limit,
                    "extension": limit / other - 1 if other else None,
                }
            )
    return rows


def _compared(ours: Sequence[Ran], against: Sequence[Ran]) -> dict[str, object]:
    """Cumulative seconds until the first of the two ends."""
    count = min(len(ours), len(against))
    seconds = sum(ran.seconds or 0.0 for ran in ours[:count])
    other = sum(ran.seconds or 0.0 for ran in against[:count])
    return {
        "documents": count,
        "seconds_against": other,
        "seconds": seconds,
        "reduction": 1 - seconds / other if count else None,
        "longest_against": against[-1].tokens if against else 0,
        "longest": ours[-1].tokens if ours else 0,
    }


def compared_lengths(limit: int) -> list[int]:
    """Multiples of 64 from half a thousand to the limit, 2% apart."""
    count = int(np.log(limit / SHORTEST) / np.log(SPACING)) + 2
    spaced = np.geomspace(SHORTEST, limit, count)
    return sorted({int(round(s / 64) * 64) for s in spaced} | {limit})


def check_rows(costs: ModelCosts, limits: Limits, documents: Iterable[int]) -> list[dict]:
    """Where a framework is slower than the best single strategy that fits, at any length.

    Lengths: those of the documents and compared_lengths. The published framework sorted.
    """
    rows = []
    for framework, head, among in (
        (ours(), TILED, "ten"),
        (as_published(), UNTILED, "five"),
    ):
        fixed = FixedRunner(costs, head)
        longest = max(limits.single[head].values())
        lengths = sorted({*documents, *compared_lengths(longest)})
        slower, worst, failing, compared = 0, 0.0, 0, 0
        for ran in Runner(costs, framework).run(lengths):
            alone = fixed.run(ran.tokens)
            names = FIXED if among == "five" else tuple(alone)
            fitting = [s for s in (alone[n].seconds for n in names) if s is not None]
            if not fitting:
                continue
            compared += 1
            if ran.seconds is None:
                failing += 1
                continue
            ratio = ran.seconds / min(fitting)
            worst, slower = max(worst, ratio), slower + (ratio > 1 + ROUNDING)
        rows.append(
            {
                "model": costs.model,
                "framework": framework.name,
                "among": among,
                "lengths": compared,
                "slower": slower,
                "worst_ratio": worst,
                "not_fitting": failing,
            }
        )
    return rows


def crossover_rows(costs: ModelCosts, limits: Limits) -> list[dict]:
    """Which of the five strategies is the fastest from where to where, with and without limit."""
    rows = []
    for head in (TILED, UNTILED):
        runner = FixedRunner(costs, head)
        limit = max(v for n, v in limits.single[head].items() if not n.endswith(RECOMPUTE))
        lengths = compared_lengths(min(limit, MOST_TOKENS))
        for memory in ("80 GB", "unlimited"):
            setup = runner.setup
            policy = setup.policy if memory == "80 GB" else setup.with_budget(1 << 20)
            best = [_fastest(setup, policy, tokens) for tokens in lengths]
            rows += _ranges(lengths, best, {"model": costs.model, "head": head, "memory": memory})
    return rows


def _fastest(setup, policy, tokens: int) -> str:
    from megatron_paradyse.preview.forecast import alone

    found = alone(policy.problem(setup.layers, 1, tokens, False), FIXED)
    fitting = {name: outcome.seconds for name, outcome in found.items() if outcome.fits}
    return min(fitting, key=lambda name: fitting[name]) if fitting else ""


def _ranges(lengths: list[int], names: list[str], common: dict) -> list[dict]:
    rows: list[dict] = []
    for tokens, name in zip(lengths, names, strict=True):
        if rows and rows[-1]["fastest"] == name:
            rows[-1]["to_tokens"] = tokens
        else:
            rows.append(
                {**common, "from_tokens": tokens, "to_tokens": tokens, "fastest": name or "none"}
            )
    return rows
