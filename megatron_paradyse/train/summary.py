"""At the end of a training: what its plans were, and what they are believed to have saved."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from megatron_paradyse.planner.policies import CostPolicy
from megatron_paradyse.train.telemetry import Microbatch

MOST_SHAPES = 10_000  # kept for the estimate of fixed strategies


class Summary:
    """Adds up the microbatches of one rank."""

    def __init__(self, policies: Sequence[CostPolicy] = ()):
        """policies: those that choose by cost, of which the estimates are asked."""
        self._policies = policies
        self._microbatches = self._switches = 0
        self._seconds = self._planner_seconds = 0.0
        self._shares: defaultdict[str, float] = defaultdict(float)
        self._second_shares: defaultdict[str, float] = defaultdict(float)
        self._errors: list[float] = []
        self._shapes: Counter[tuple[int, int, tuple[int, ...]]] = Counter()
        self._predicted: dict[tuple[int, int, tuple[int, ...]], float] = {}

    def add(self, microbatches: Sequence[Microbatch]) -> None:
        for microbatch in microbatches:
            planned, seconds = microbatch.planned, microbatch.seconds or 0.0
            layers = planned.plan.layers
            self._microbatches += 1
            self._switches += microbatch.switched
            self._seconds += seconds
            self._planner_seconds += planned.planner_seconds
            share = 1 / (2 * len(layers))
            for choice in layers.values():
                for name in (choice.attention, choice.mlp):
                    self._shares[name] += share
                    self._second_shares[name] += share * seconds
            if planned.seconds and seconds:
                self._errors.append(abs(planned.seconds / seconds - 1))
                shape = (planned.batch_size, planned.seq_length, tuple(layers))
                if shape in self._shapes or len(self._shapes) < MOST_SHAPES:
                    self._shapes[shape] += 1
                    self._predicted[shape] = planned.seconds

    def lines(self) -> list[str]:
        """The table; empty if nothing ran."""
        if not self._microbatches:
            return []
        lines = [
            f"paradyse: {self._microbatches} microbatches, {self._switches} changes of plan, "
            f"planning took {self._planner_seconds / max(self._seconds, 1e-9):.2%} of the layers' "
            "time",
            f"  {'strategy':<24}{'layers':>8}{'time':>8}",
        ]
        for name in sorted(self._shares, key=lambda name: -self._shares[name]):
            part = self._shares[name] / self._microbatches
            time = self._second_shares[name] / max(self._seconds, 1e-9)
            lines.append(f"  {name:<24}{part:>8.1%}{time:>8.1%}")
        if self._errors:
            lines.append(
                f"  predicted against measured time of the layers: median error "
                f"{statistics.median(self._errors):.1%}"
            )
            lines += self._fixed_lines()
        return lines

    def _fixed_lines(self) -> list[str]:
        """Every strategy alone on the same microbatches, by the cost model."""
        ours = sum(self._predicted[shape] * count for shape, count in self._shapes.items())
        lines = ["  estimated by the cost model, had one strategy run everything:"]
        names = dict.fromkeys(name for policy in self._policies for name in policy.strategies)
        for name in names:
            seconds, unfit = 0.0, 0
            for (b, s, layers), count in self._shapes.items():
                outcome = self._uniform(name, b, s, layers)
                if outcome is None or not outcome.fits:
                    unfit += count
                else:
                    seconds += outcome.seconds * count
            text = f"{seconds / ours - 1:+.1%} time" if not unfit else f"{unfit} would not fit"
            lines.append(f"  {name:<24}{text}")
        return lines

    def _uniform(self, name: str, b: int, s: int, layers: tuple[int, ...]):
        for policy in self._policies:
            outcome = policy.uniform(name, b, s, layers)
            if outcome is not None:
                return outcome
        return None
