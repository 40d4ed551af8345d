"""Plans remembered per shape of a microbatch, and plans kept while they are good enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_paradyse.plan import Plan
from megatron_paradyse.planner.peak import evaluate
from megatron_paradyse.planner.problem import Outcome, Planner, Problem

# b, s rounded up to the alignment, forward_only; of a packed row then what else its costs depend on
Key = tuple[Any, ...]
CAPACITY = 4096  # shapes
MakeProblem = Callable[..., Problem]  # of the parts of a key


class CachedPlanner:
    """A planner per (b, s): s is rounded up to the alignment, and planned as that.

    A packed row adds to the key whatever is hashable and says what it costs.

    Holds at most `capacity` outcomes; the one unused for longest goes first. An outcome depends on
    its key alone, never on what was planned before.
    """

    def __init__(
        self,
        planner: Planner,
        problem: MakeProblem,
        *,
        alignment: int = 1,
        capacity: int = CAPACITY,
    ):
        """capacity 0 remembers nothing."""
        if alignment < 1 or capacity < 0:
            raise ValueError(
                f"alignment is at least 1 and capacity 0, got {alignment} and {capacity}"
            )
        self._planner, self._problem = planner, problem
        self._alignment, self._capacity = alignment, capacity
        self._outcomes: dict[Key, Outcome] = {}

    def key(
        self, batch_size: int, seq_length: int, forward_only: bool = False, *packed: Any
    ) -> Key:
        aligned = -(-seq_length // self._alignment) * self._alignment
        return (batch_size, aligned, forward_only, *packed)

    def problem(self, key: Key) -> Problem:
        return self._problem(*key)

    def plan(
        self, batch_size: int, seq_length: int, forward_only: bool = False, *packed: Any
    ) -> Outcome:
        aligned = -(-seq_length // self._alignment) * self._alignment
        key = (batch_size, aligned, forward_only, *packed)
        outcome = self._outcomes.pop(key, None)
        if outcome is None:
            outcome = self._planner.plan(self._problem(*key))
            if not self._capacity:
                return outcome
            if len(self._outcomes) >= self._capacity:
                del self._outcomes[next(iter(self._outcomes))]
        self._outcomes[key] = outcome  # the last of the dict is the last used
        return outcome

    def clear(self) -> None:
        """Forget everything: the costs have changed."""
        self._outcomes.clear()


class SmoothedPlanner:
    """Keeps the plan of the previous microbatch where it takes at most (1 + gamma) of the new one's
    time for this shape, and fits.

    The previous plan is state: ranks that see the same shapes in the same order keep the same, and
    a restart goes on alike if `previous` is saved and put back. Training and evaluation are apart.
    """

    def __init__(self, cached: CachedPlanner, *, gamma: float = 0.05, capacity: int = CAPACITY):
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma is a fraction from 0 to 1, got {gamma}")
        self.cached, self._gamma, self._capacity = cached, gamma, capacity
        self.previous: dict[bool, Plan] = {}  # by forward_only
        self._judged: dict[Key, tuple[Plan, Outcome]] = {}

    def plan(
        self, batch_size: int, seq_length: int, forward_only: bool = False, *packed: Any
    ) -> Outcome:
        outcome = self.cached.plan(batch_size, seq_length, forward_only, *packed)
        previous = self.previous.get(forward_only)
        if previous is not None and previous is not outcome.plan:
            key = self.cached.key(batch_size, seq_length, forward_only, *packed)
            outcome = self._judge(key, outcome)
        self.previous[forward_only] = outcome.plan
        return outcome

    def clear(self) -> None:
        """Forget what is remembered of costs; the previous plan stays."""
        self._judged.clear()
        self.cached.clear()

    def _judge(self, key: Key, new: Outcome) -> Outcome:
        """The previous plan's outcome if it is good enough, or the new one."""
        previous = self.previous[key[2]]
        known = self._judged.pop(key, None)
        if known is None or known[0] is not previous:
            kept = evaluate(self.cached.problem(key), previous) if new.fits else None
            good = kept is not None and kept.fits
            if kept is None or not good or kept.seconds > (1 + self._gamma) * new.seconds:
                kept = new
            known = (previous, kept)
            if len(self._judged) >= self._capacity:
                del self._judged[next(iter(self._judged))]
        self._judged[key] = known
        return known[1]
