"""What a planner is given, numbers only, and what it answers.

A stage runs its layers in the order of their numbers, attention before MLP, and backward in
reverse. Bytes are whole numbers, so that sums are exact and every rank computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import LayerChoice, Plan

MOST_BYTES = 1 << 53  # of which planners make sums in float64, exactly
GRANULARITIES = ("operation", "layer", "sequence")


class TooLargeError(UserError):
    """A microbatch whose bytes are beyond what planners count."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one operation of one layer costs under one strategy.

    kept_bytes      live after its forward less live before, its output included
    forward_bytes   peak during its forward, above live after it
    backward_bytes  peak during its backward, above live at its start: everything kept up to and
                    including this operation
    gathers         whether it needs the problem's gather_bytes besides

    Where a problem is forward_only, seconds are those of a forward without gradient,
    forward_bytes is above what is live after it, and the other two are not read.
    """

    name: str
    seconds: float
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    gathers: bool = False

    def __post_init__(self) -> None:
        least = min(self.kept_bytes, self.forward_bytes, self.backward_bytes)
        if not (least >= 0 and 0 <= self.seconds < math.inf):
            raise ValueError(f"costs are finite and at least 0, got {self}")

    @property
    def workspace_bytes(self) -> int:
        """The peak of forward and backward, above what is live between the two."""
        return max(self.forward_bytes, self.backward_bytes)

    @property
    def most_bytes(self) -> int:
        """It keeps no more, what it needs besides included."""
        return self.kept_bytes + self.forward_bytes + self.backward_bytes


@dataclass(frozen=True, eq=False)
class LayerOptions:
    """The choices of one layer. Layers that share one object are alike.

    pairs gives (attention, mlp) names whose costs together are not the sum of the two, as when
    both recompute and one checkpoint surrounds the layer; its numbers are those of a whole layer.
    same gives, of pairs that run what another pair runs, the names of that one, whose numbers are
    theirs: a plan may name them, a planner need not. It does not try untried pairs either, unless
    there are no others.
    """

    attention: tuple[Choice, ...]
    mlp: tuple[Choice, ...]
    pairs: Mapping[tuple[str, str], Choice] = field(default_factory=dict)
    same: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    untried: frozenset[tuple[str, str]] = frozenset()

    def __post_init__(self) -> None:
        for operation in ("attention", "mlp"):
            names = [choice.name for choice in getattr(self, operation)]
            if not names or len(set(names)) != len(names):
                raise ValueError(f"{operation} needs choices of different names, got {names}")

    @property
    def halves(self) -> dict[str, tuple[Choice, ...]]:
        return {"attention": self.attention, "mlp": self.mlp}

    @property
    def most_bytes(self) -> int:
        """No layer of these keeps more, what it needs besides included."""
        halves = (self.attention, self.mlp, self.pairs.values())
        return sum(max((choice.most_bytes for choice in half), default=0) for half in halves)

    def pair(self, attention: str, mlp: str) -> Choice | None:
        """The costs that these two have together, if they are not the sum of the two."""
        return self.pairs.get(self.same.get((attention, mlp), (attention, mlp)))


@dataclass(frozen=True, eq=False)
class Problem:
    """The layers of one pipeline stage, for one microbatch.

    base_bytes       live before the first layer: static, what earlier microbatches in flight
                     hold, what the embedding keeps
    head_bytes       peak of the loss head, above everything that the layers keep
    tail_bytes       peak of what else runs while this microbatch holds everything it keeps: the
                     backward of an earlier microbatch, above what both hold
    embedding_bytes  peak of the embedding's forward and backward, above base_bytes
    gather_bytes     live from beginning to end if any operation gathers: one buffer for all
    budget_bytes     what the peak may reach
    """

    layers: Mapping[int, LayerOptions]
    budget_bytes: int
    base_bytes: int = 0
    head_bytes: int = 0
    tail_bytes: int = 0
    embedding_bytes: int = 0
    gather_bytes: int = 0
    granularity: str = "operation"
    forward_only: bool = False

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity is one of {GRANULARITIES}, got {self.granularity!r}")
        if not self.layers:
            raise ValueError("a problem needs at least one layer")

    @property
    def room_bytes(self) -> int:
        """What the layers may add to base_bytes."""
        return self.budget_bytes - self.base_bytes

    @property
    def reserve_bytes(self) -> int:
        """What must stay free above everything that the layers keep."""
        return max(self.head_bytes, self.tail_bytes)


@dataclass(frozen=True)
class Outcome:
    """A plan, what it costs by the numbers of its problem, and by how much it passes the budget.

    bound_seconds: no plan of such a peak takes less. None where a planner proves nothing.
    """

    plan: Plan
    seconds: float
    peak_bytes: int
    exceeds_bytes: int
    bound_seconds: float | None = None

    @property
    def fits(self) -> bool:
        return self.exceeds_bytes == 0


def preference(outcome: Outcome) -> tuple[bool, float, float]:
    """Fitting before not; then the faster, or where nothing fits the smaller."""
    if outcome.fits:
        return (False, outcome.seconds, outcome.peak_bytes)
    return (True, outcome.peak_bytes, outcome.seconds)


# of a layer's options, "attention" or "mlp", a choice: whether it is taken away
Drop = Callable[[LayerOptions, str, Choice], bool]


def problem_less(problem: Problem, drop: Drop) -> Problem | None:
    """The problem without some choices; itself if that is none, None if a half has no other.

    A half with one choice counts as fixed where a layer, or all of them, runs one strategy: halves
    that have more keep what is left in both, or in all, so that none becomes fixed beside another's
    strategy.
    """
    alike = {id(options): options for options in problem.layers.values()}
    fewer = {key: _less(o, drop, problem.granularity) for key, o in alike.items()}
    if all(fewer[key] is options for key, options in alike.items()):
        return problem
    if problem.granularity == "sequence":
        shared = _left_everywhere(problem, drop)
        fewer = {key: _less(o, _but(shared, drop), "sequence") for key, o in alike.items()}
    layers = {number: fewer[id(options)] for number, options in problem.layers.items()}
    left = {number: options for number, options in layers.items() if options is not None}
    return replace(problem, layers=left) if len(left) == len(layers) else None


def _left_everywhere(problem: Problem, drop: Drop) -> set[str]:
    """The names that every half with a choice keeps."""
    left = [
        {choice.name for choice in choices if not drop(options, half, choice)}
        for options in set(problem.layers.values())
        for half, choices in options.halves.items()
        if len(choices) > 1
    ]
    return set.intersection(*left) if left else set()


def _but(shared: set[str], drop: Drop) -> Drop:
    """Drops of a half with a choice all but these names."""

    def both(options: LayerOptions, half: str, choice: Choice) -> bool:
        fixed = len(options.halves[half]) == 1
        return drop(options, half, choice) or not (fixed or choice.name in shared)

    return both


def _less(options: LayerOptions, drop: Drop, granularity: str) -> LayerOptions | None:
    halves = options.halves
    left = {
        half: tuple(choice for choice in choices if not drop(options, half, choice))
        for half, choices in halves.items()
    }
    if left == halves:
        return options
    attention, mlp = left.values()
    if granularity != "operation" and min(map(len, halves.values())) > 1:
        shared = {c.name for c in attention} & {c.name for c in mlp}
        attention, mlp = (
            tuple(c for c in choices if c.name in shared) for choices in (attention, mlp)
        )
    return replace(options, attention=attention, mlp=mlp) if attention and mlp else None


class Planner(Protocol):
    """Chooses a plan from a problem: the same plan for the same problem, on every rank."""

    def plan(self, problem: Problem) -> Outcome:
        """A plan within the budget if the planner finds one, or else one of little peak."""
        ...


def layer_choice(attention: str, mlp: str) -> LayerChoice:
    """One object per pair of names: plans share them."""
    choice = _CHOICES.get((attention, mlp))
    if choice is None:
        choice = _CHOICES[attention, mlp] = LayerChoice(attention, mlp)
    return choice


_CHOICES: dict[tuple[str, str], LayerChoice] = {}
