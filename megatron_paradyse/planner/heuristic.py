"""Algorithm 1 of the ParaDySe paper (AAAI-26): mixes of at most two strategies.

As published, with the peak of a plan computed by the walk instead of a sum of per-layer peaks, and
with nothing remembered between problems here: cache.py caches and smooths. Strategies are whole
layers', attention and MLP alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_paradyse.planner.peak import evaluate
from megatron_paradyse.planner.problem import Outcome, Problem
from megatron_paradyse.planner.uniform import common_strategies, mixed_plan


@dataclass(frozen=True)
class HeuristicPlanner:
    """Each part of the algorithm can be switched off.

    prune              drop strategies that another beats in time and in memory
    short_circuit      take the fastest strategy at once if it fits on all layers
    mix                consider two strategies, the first layers with the faster
    early_termination  stop at the first mix of two strategies that fits, counting layers down: the
                       rest of that pair is slower; skip pairs that cannot win. Only where all
                       layers are alike: elsewhere more layers of the faster may be slower
    """

    prune: bool = True
    short_circuit: bool = True
    mix: bool = True
    early_termination: bool = True

    def plan(self, problem: Problem) -> Outcome:
        uniform = self._uniform(problem)
        if self.short_circuit and next(iter(uniform.values())).fits:
            return next(iter(uniform.values()))
        best: Outcome | None = None
        for outcome in self._candidates(problem, uniform):
            if outcome.fits and (best is None or outcome.seconds < best.seconds):
                best = outcome
        if best is not None:
            return best
        return min(uniform.values(), key=lambda outcome: (outcome.peak_bytes, outcome.seconds))

    def _uniform(self, problem: Problem) -> dict[str, Outcome]:
        """Every strategy on all layers, by ascending time, less those that another beats."""
        outcomes = []
        for name in common_strategies(problem):
            outcome = evaluate(problem, mixed_plan(problem, name, name, 0))
            assert outcome is not None, "a common strategy is offered everywhere"
            outcomes.append((name, outcome))
        outcomes.sort(key=lambda item: item[1].seconds)
        if self.prune:
            outcomes = [item for item in outcomes if not _beaten(item[1], outcomes)]
        return dict(outcomes)

    def _candidates(self, problem: Problem, uniform: dict[str, Outcome]) -> Iterator[Outcome]:
        yield from uniform.values()
        if not self.mix or problem.granularity == "sequence":
            return
        names, num_layers = list(uniform), len(problem.layers)
        terminate = self.early_termination and len(set(problem.layers.values())) == 1
        fastest = min((o.seconds for o in uniform.values() if o.fits), default=float("inf"))
        for position, first in enumerate(names):
            if uniform[first].fits:
                continue
            for rest in names[position + 1 :]:
                if terminate and uniform[first].seconds >= fastest:
                    break
                for count in range(num_layers - 1, 0, -1):
                    outcome = evaluate(problem, mixed_plan(problem, first, rest, count))
                    assert outcome is not None
                    if outcome.fits:
                        yield outcome
                        fastest = min(fastest, outcome.seconds)
                        if terminate:
                            break


def _beaten(outcome: Outcome, others: list[tuple[str, Outcome]]) -> bool:
    return any(
        other.seconds < outcome.seconds and other.peak_bytes < outcome.peak_bytes
        for _, other in others
    )
