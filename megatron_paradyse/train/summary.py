"""What the plans of a training were, and what they are believed to have saved.

Numbers only, no torch: a training adds up its microbatches here and prints the table at its end,
and the report (megatron_paradyse/report) adds up those of a trace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_paradyse.packing.load import Load
from megatron_paradyse.packing.row import Row
from megatron_paradyse.plan import Plan
from megatron_paradyse.planner.policies import CostPolicy
from megatron_paradyse.planner.problem import Outcome

if TYPE_CHECKING:
    from megatron_paradyse.train.telemetry import Microbatch

MOST_SHAPES = 10_000  # kept for the estimate of fixed strategies
LARGEST_ERROR = 10.0  # errors beyond count as this


class RunningMedian:
    """The median of relative errors, to a tenth of a percent, in bounded memory."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, error: float) -> None:
        self._counts[round(1000 * min(error, LARGEST_ERROR))] += 1

    @property
    def value(self) -> float | None:
        """None if nothing was added."""
        half, passed = (self._counts.total() + 1) // 2, 0
        for key in sorted(self._counts):
            passed += self._counts[key]
            if passed >= half:
                return key / 1000
        return None


@dataclass
class ShapeTotals:
    """The microbatches of one (b, s) on one stage: how many, measured and predicted seconds."""

    count: int = 0
    seconds: float = 0.0
    num_predicted: int = 0
    predicted_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Uniform:
    """One strategy on every layer of one microbatch: predicted seconds, and whether it fits."""

    seconds: float
    fits: bool


@dataclass(frozen=True)
class FixedEstimate:
    """One strategy everywhere, by the cost model: seconds of what fits, and how many do not."""

    name: str
    seconds: float
    num_unfit: int


# b, s as it was planned for, layer numbers; of packed rows then what else their costs depend on
Shape = tuple[int, int, tuple[int, ...]] | tuple[int, int, tuple[int, ...], Load]


class Summary:
    """Adds up the microbatches of one rank."""

    def __init__(self, policies: Sequence[CostPolicy] = ()):
        """policies: those that choose by cost, of which the estimates are asked."""
        self._policies = policies
        self.microbatches = self.switches = self.shapeless = self.unpriced = 0
        self.seconds = self.planner_seconds = 0.0
        self._shares: defaultdict[str, float] = defaultdict(float)
        self._second_shares: defaultdict[str, float] = defaultdict(float)
        self._errors = RunningMedian()
        self._shapes: dict[Shape, ShapeTotals] = {}
        self._uniforms: dict[Shape, dict[str, Uniform]] = {}

    def add(self, microbatches: Sequence[Microbatch]) -> None:
        for microbatch in microbatches:
            planned = microbatch.planned
            self.count(
                planned.batch_size,
                planned.seq_length,
                planned.plan,
                switched=microbatch.switched,
                planner_seconds=planned.planner_seconds,
                predicted_seconds=planned.seconds,
                seconds=microbatch.seconds,
                row=planned.row,
            )

    def count(
        self,
        batch_size: int,
        seq_length: int,
        plan: Plan,
        *,
        switched: bool,
        planner_seconds: float,
        predicted_seconds: float | None,
        seconds: float | None,
        row: Row | None = None,
        priced: bool = True,
    ) -> None:
        """Add one microbatch; seconds are those of its layers, None where they are not known.

        priced: False leaves it out of the estimates, as a packed row of which no more is known.
        """
        layers, measured = plan.layers, seconds or 0.0
        self.microbatches += 1
        self.switches += switched
        self.seconds += measured
        self.planner_seconds += planner_seconds
        share = 1 / (2 * len(layers))
        for choice in layers.values():
            for name in (choice.attention, choice.mlp):
                self._shares[name] += share
                self._second_shares[name] += share * measured
        if predicted_seconds and seconds:
            self._errors.add(abs(predicted_seconds / seconds - 1))
        if not priced:
            self.unpriced += 1
            return
        shape = self._shape(batch_size, seq_length, tuple(layers), row)
        if shape not in self._shapes and len(self._shapes) >= MOST_SHAPES:
            self.shapeless += 1
            return
        totals = self._shapes.setdefault(shape, ShapeTotals())
        totals.count += 1
        totals.seconds += measured
        if predicted_seconds and seconds:
            totals.num_predicted += 1
            totals.predicted_seconds += predicted_seconds

    def _shape(self, b: int, s: int, layers: tuple[int, ...], row: Row | None) -> Shape:
        if not self._policies:
            return b, s, layers
        policy = self._policies[0]
        if row is not None and policy.rows is not None:
            load = policy.rows.load(row)
            return b, load.seq_length, layers, load
        return b, -(-s // policy.alignment) * policy.alignment, layers

    @property
    def layer_shares(self) -> dict[str, float]:
        """The part of all layers' halves that each strategy ran, the largest first."""
        total = max(self.microbatches, 1)
        names = sorted(self._shares, key=lambda name: -self._shares[name])
        return {name: self._shares[name] / total for name in names}

    @property
    def time_shares(self) -> dict[str, float]:
        """The part of the layers' time, where a layer's half counts as half of its layer's."""
        total = max(self.seconds, 1e-9)
        return {name: self._second_shares[name] / total for name in self.layer_shares}

    @property
    def median_error(self) -> float | None:
        """Of predicted against measured seconds; None without predictions."""
        return self._errors.value

    @property
    def shapes(self) -> list[tuple[Shape, ShapeTotals]]:
        """Those that were counted, short to long."""
        return sorted(self._shapes.items(), key=lambda item: (item[0][1], item[0][0]))

    @property
    def predicted_seconds(self) -> float:
        """Of all priced microbatches that have a prediction and a measurement."""
        return sum(totals.predicted_seconds for totals in self._shapes.values())

    def uniforms(self, shape: Shape) -> dict[str, Uniform]:
        """What each strategy alone would cost at a shape, by the cost model: computed once."""
        if shape not in self._uniforms:
            found: dict[str, Outcome] = {}
            for policy in self._policies:
                found = policy.uniforms(*shape) | found
            self._uniforms[shape] = {
                name: Uniform(outcome.seconds, outcome.fits) for name, outcome in found.items()
            }
        return self._uniforms[shape]

    def fixed_estimates(self) -> list[FixedEstimate]:
        """Every strategy alone on the microbatches that have predictions."""
        names = list(dict.fromkeys(name for policy in self._policies for name in policy.strategies))
        seconds, unfit = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        for shape, totals in self._shapes.items():
            if not totals.num_predicted:
                continue
            outcomes = self.uniforms(shape)
            for name in names:
                outcome = outcomes.get(name)
                if outcome is None or not outcome.fits:
                    unfit[name] += totals.num_predicted
                else:
                    seconds[name] += outcome.seconds * totals.num_predicted
        return [FixedEstimate(name, seconds[name], unfit[name]) for name in names]

    def lines(self) -> list[str]:
        """The table; empty if nothing ran."""
        if not self.microbatches:
            return []
        lines = [
            f"paradyse: {self.microbatches} microbatches, {self.switches} changes of plan, "
            f"planning took {self.planner_seconds / max(self.seconds, 1e-9):.2%} of the layers' "
            "time",
            f"  {'strategy':<24}{'layers':>8}{'time':>8}",
        ]
        times = self.time_shares
        for name, part in self.layer_shares.items():
            lines.append(f"  {name:<24}{part:>8.1%}{times[name]:>8.1%}")
        if self.median_error is not None:
            lines.append(
                f"  predicted against measured time of the layers: median error "
                f"{self.median_error:.1%}"
            )
            lines.append("  estimated by the cost model, had one strategy run everything:")
            for fixed in self.fixed_estimates():
                more = fixed.seconds / self.predicted_seconds - 1
                text = (
                    f"{fixed.num_unfit} would not fit" if fixed.num_unfit else f"{more:+.1%} time"
                )
                lines.append(f"  {fixed.name:<24}{text}")
        return lines
