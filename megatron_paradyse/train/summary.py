"""What the plans of a training were, and what they are believed to have saved.

Numbers only, no torch: a training adds up its microbatches here and prints the table at its end,
and the report (megatron_paradyse/report) adds up those of a trace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_paradyse.packing.load import Load
from megatron_paradyse.packing.row import aligned
from megatron_paradyse.plan import Plan
from megatron_paradyse.planner.policies import CostPolicy
from megatron_paradyse.planner.problem import TooLargeError

if TYPE_CHECKING:
    from megatron_paradyse.train.telemetry import Microbatch

MOST_SHAPES = 10_000  # kept for the estimate of fixed strategies
FINE_ERROR = 10.0  # errors beyond count to three digits
LARGEST_ERROR = 1e6  # errors beyond count as this


class RunningMedian:
    """The median of relative errors, to a tenth of a percent or three digits, in bounded memory."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, error: float) -> None:
        error = min(error, LARGEST_ERROR)
        exact = error if error <= FINE_ERROR else float(f"{error:.2e}")
        self._counts[round(1000 * exact)] += 1

    def join(self, other: RunningMedian) -> None:
        self._counts += other._counts

    @property
    def value(self) -> float | None:
        """None if nothing was added."""
        half, passed = (self._counts.total() + 1) // 2, 0
        for key in sorted(self._counts):
            passed += self._counts[key]
            if passed >= half:
                return key / 1000
        return None


@dataclass(slots=True)
class Alone:
    """One strategy on every layer, by the cost model: of how many microbatches it is known, the
    seconds of those that fit, how many do not.
    """

    count: int = 0
    seconds: float = 0.0
    num_unfit: int = 0

    def add(self, seconds: float | None) -> None:
        """One microbatch; None: it does not fit."""
        self.count += 1
        if seconds is None:
            self.num_unfit += 1
        else:
            self.seconds += seconds

    def join(self, other: Alone) -> None:
        self.count += other.count
        self.seconds += other.seconds
        self.num_unfit += other.num_unfit


@dataclass
class ShapeTotals:
    """The microbatches of one (b, s) on one stage: how many, measured and predicted seconds, and
    what each strategy alone would have taken.
    """

    count: int = 0
    seconds: float = 0.0
    num_predicted: int = 0
    predicted_seconds: float = 0.0
    alone: defaultdict[str, Alone] = field(default_factory=lambda: defaultdict(Alone))


@dataclass(frozen=True, slots=True)
class Uniforms:
    """Of one shape, what each strategy alone takes, None where it does not fit; and what the plan
    that ran was predicted to take by the same costs.
    """

    seconds: dict[str, float | None]
    predicted_seconds: float | None


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
        """policies: those that choose by cost, of whose microbatches estimates are made."""
        self._policies = policies
        self.microbatches = self.switches = self.shapeless = self.unpriced = 0
        self.layers = 0  # of all microbatches: chunks of a pipeline may differ in theirs
        self.seconds = self.planner_seconds = 0.0
        self._halves: Counter[str] = Counter()
        self._second_shares: defaultdict[str, float] = defaultdict(float)
        self.errors = RunningMedian()  # of seconds, where they are known
        self._shapes: dict[Shape, ShapeTotals] = {}
        self._uniforms: dict[tuple[Shape, frozenset[str]], Uniforms] = {}
        self._alone: defaultdict[str, Alone] = defaultdict(Alone)
        self._num_predicted = 0

    def add(self, microbatches: Sequence[Microbatch]) -> None:
        for microbatch in microbatches:
            planned = microbatch.planned
            policy = next((p for p in self._policies if p is planned.policy), None)
            load, barred = None, frozenset[str]()
            if policy is not None:
                barred = policy.barred(planned.batch_size, planned.seq_length, planned.row)
                if planned.row is not None and policy.rows is not None:
                    load = policy.rows.load(planned.row)
            self.count(
                planned.batch_size,
                planned.seq_length,
                planned.plan,
                switched=microbatch.switched,
                planner_seconds=planned.planner_seconds,
                predicted_seconds=planned.seconds,
                seconds=microbatch.seconds,
                load=load,
                policy=policy,
                barred=barred,
            )

    def renew(self) -> None:
        """Estimate anew from now on: the policies give other numbers."""
        self._uniforms.clear()

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
        load: Load | None = None,
        priced: bool = True,
        policy: CostPolicy | None = None,
        barred: frozenset[str] = frozenset(),
    ) -> None:
        """Add one microbatch; seconds are those of its layers, None where they are not known.

        load: of a packed row, on which its costs depend.
        priced: False leaves it out of the estimates, as a packed row of which no more is known.
        policy: by which it is estimated, with its costs as they are now: those that it ran with.
        barred: the strategies that cannot run it.
        """
        layers, measured = plan.layers, seconds or 0.0
        self.microbatches += 1
        self.switches += switched
        self.seconds += measured
        self.planner_seconds += planner_seconds
        self.layers += len(layers)
        for choice in layers.values():
            for name in (choice.attention, choice.mlp):
                self._halves[name] += 1
                self._second_shares[name] += measured / (2 * len(layers))
        if predicted_seconds and seconds:
            self.errors.add(abs(predicted_seconds / seconds - 1))
        if not priced:
            self.unpriced += 1
            return
        shape = _shape(batch_size, seq_length, tuple(layers), load, policy)
        if shape not in self._shapes and len(self._shapes) >= MOST_SHAPES:
            self.shapeless += 1
            return
        totals = self._shapes.setdefault(shape, ShapeTotals())
        totals.count += 1
        totals.seconds += measured
        sums = [totals.alone]
        if predicted_seconds and seconds:
            totals.num_predicted += 1
            totals.predicted_seconds += predicted_seconds
            self._num_predicted += 1
            sums.append(self._alone)
        if policy is not None:
            for name, alone_seconds in self._uniform_seconds(
                policy, shape, barred, predicted_seconds
            ):
                for alone in sums:
                    alone[name].add(alone_seconds)

    def _uniform_seconds(
        self,
        policy: CostPolicy,
        shape: Shape,
        barred: frozenset[str],
        predicted_seconds: float | None,
    ) -> Iterable[tuple[str, float | None]]:
        """What each strategy that may run everywhere takes at a shape, None where it does not fit.

        Computed again where the shape was predicted otherwise before: corrections change the costs
        of all strategies at once.
        """
        known = self._uniforms.get((shape, barred))
        if known is None or known.predicted_seconds != predicted_seconds:
            try:
                outcomes = policy.uniforms(*shape, barred=barred).items()
                seconds = {name: one.seconds if one.fits else None for name, one in outcomes}
            except TooLargeError:  # a trace may tell of any length
                seconds = dict.fromkeys(policy.strategies)
            known = self._uniforms[shape, barred] = Uniforms(seconds, predicted_seconds)
        return known.seconds.items()

    @property
    def layer_shares(self) -> dict[str, float]:
        """The part of all layers' halves that each strategy ran, the largest first."""
        total = max(2 * self.layers, 1)
        return {name: count / total for name, count in self._halves.most_common()}

    @property
    def time_shares(self) -> dict[str, float]:
        """The part of the layers' time, where a layer's half counts as half of its layer's."""
        total = max(self.seconds, 1e-9)
        return {name: self._second_shares[name] / total for name in self.layer_shares}

    @property
    def median_error(self) -> float | None:
        """Of predicted against measured seconds; None without predictions."""
        return self.errors.value

    @property
    def shapes(self) -> list[tuple[Shape, ShapeTotals]]:
        """Those that were counted, short to long."""
        return sorted(self._shapes.items(), key=lambda item: (item[0][1], item[0][0]))

    @property
    def predicted_seconds(self) -> float:
        """Of all priced microbatches that have a prediction and a measurement."""
        return sum(totals.predicted_seconds for totals in self._shapes.values())

    def fixed_estimates(self) -> list[FixedEstimate]:
        """Every strategy alone on the microbatches that have predictions.

        Those that could have run all of them: others may have come with a restart.
        """
        return [
            FixedEstimate(name, alone.seconds, alone.num_unfit)
            for name, alone in self._alone.items()
            if alone.count == self._num_predicted
        ]

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
                more = round(fixed.seconds / self.predicted_seconds - 1, 3) + 0.0  # no -0.0
                text = (
                    f"{fixed.num_unfit} would not fit" if fixed.num_unfit else f"{more:+.1%} time"
                )
                lines.append(f"  {fixed.name:<24}{text}")
        return lines


def _shape(
    b: int, s: int, layers: tuple[int, ...], load: Load | None, policy: CostPolicy | None
) -> Shape:
    if policy is None:
        return b, s, layers
    if load is not None:
        return b, load.seq_length, layers, load
    return b, aligned(s, policy.alignment), layers
