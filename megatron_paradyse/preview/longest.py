"""The longest sequence that each strategy on all layers, and ParaDySe, can train."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_paradyse.costs.layers import LAYER, half_of
from megatron_paradyse.errors import UserError
from megatron_paradyse.planner.from_file import ALIGNMENT
from megatron_paradyse.planner.problem import Outcome, Problem, TooLargeError
from megatron_paradyse.preview.forecast import Forecast, alone, forecast, row_over
from megatron_paradyse.preview.setup import Setup
from megatron_paradyse.strategies import names_of_costs, offloads, recomputes
from megatron_paradyse.units import MAX_SEQ_LENGTH

PARADYSE = "ParaDySe"  # in the place of a strategy's name: plans chosen by cost


@dataclass(frozen=True)
class Limit:
    """tokens: 0 where nothing fits; profiled: the longest at which all its operations were timed,
    at this b; 0 where some were not.
    """

    strategy: str
    tokens: int
    profiled: int
    outcome: Outcome | None  # at that length

    @property
    def extrapolated(self) -> bool:
        return self.tokens > self.profiled


@dataclass(frozen=True)
class Longest:
    """Limits in multiples of `alignment` tokens: ParaDySe's, and each strategy's alone.

    wide: ParaDySe's with a document over so many replicas as spread says, if that was asked.
    """

    batch_size: int
    alignment: int
    paradyse: Limit
    forecast: Forecast | None  # at ParaDySe's limit
    single: tuple[Limit, ...]
    spread: int = 1
    wide: Limit | None = None

    @property
    def limits(self) -> list[Limit]:
        """ParaDySe's, then the strategies', the furthest first."""
        return [self.paradyse, *sorted(self.single, key=lambda limit: -limit.tokens)]

    def best(self, *, recompute: bool = True, offload: bool = True) -> Limit | None:
        """The single strategy that reaches furthest, of those that do neither, if told so."""
        found = [limit for limit in self.single if offload or not offloads(limit.strategy)]
        found = [limit for limit in found if recompute or not recomputes(limit.strategy)]
        return max(found, key=lambda limit: limit.tokens, default=None)

    def ratio(self, *, recompute: bool = True, offload: bool = True) -> float | None:
        """ParaDySe's limit over the best single strategy's."""
        best = self.best(recompute=recompute, offload=offload)
        return self.paradyse.tokens / best.tokens if best is not None and best.tokens else None


def find_longest(setup: Setup, batch_size: int = 1, *, spread: int = 1) -> Longest:
    """By bisection on the fitted costs; UserError without a budget.

    spread: also of one document over so many replicas.
    """
    if not setup.limited:
        raise UserError(
            "without a memory budget no sequence is too long: give --memory-budget, such as 76GiB"
        )
    step = math.lcm(ALIGNMENT, 2 * setup.description.p)
    problems: dict[int, Problem] = {}

    def problem(tokens: int) -> Problem:
        if tokens not in problems:
            barred = setup.policy.barred(batch_size, tokens)
            how = setup.layers, batch_size, tokens, False, None, barred
            problems[tokens] = setup.policy.problem(*how)
        return problems[tokens]

    def planned(tokens: int) -> Outcome:
        return setup.policy.planner.plan(problem(tokens))

    # of what runs there or elsewhere; where more is longer, some layers may not offload
    names = list(alone(setup.policy.problem(setup.layers, batch_size, step, False)))
    single = []
    for name in names:

        def fits(tokens: int, name: str = name) -> bool:
            outcome = alone(problem(tokens), [name]).get(name)
            return outcome is not None and outcome.fits

        tokens = longest(fits, step)
        outcome = alone(problem(tokens), [name]).get(name) if tokens else None
        single.append(Limit(name, tokens, _profiled(setup, [name], batch_size), outcome))
    tokens = longest(lambda s: planned(s).fits, step)
    found = forecast(setup, tokens, batch_size, rivals=False) if tokens else None
    used = _used(found.outcome) if found else names
    limit = Limit(
        PARADYSE, tokens, _profiled(setup, used, batch_size), found.outcome if found else None
    )
    wide = _longest_over(setup, spread, step) if spread > 1 else None
    return Longest(batch_size, step, limit, found, tuple(single), spread, wide)


def _longest_over(setup: Setup, replicas: int, step: int) -> Limit:
    """A document over the ranks of so many replicas: a wide row of its own."""

    def planned(tokens: int) -> Outcome:
        load = setup.rows.load(row_over(setup, [tokens], replicas))
        problem = setup.policy.problem(setup.layers, 1, load.seq_length, False, load)
        return setup.policy.planner.plan(problem)

    tokens = longest(lambda s: planned(s).fits, replicas * step)
    outcome = planned(tokens) if tokens else None
    used = _used(outcome) if outcome else []
    return Limit(PARADYSE, tokens, replicas * _profiled(setup, used, 1) if used else 0, outcome)


def _fits(fits: Callable[[int], bool], tokens: int) -> bool:
    try:
        return fits(tokens)
    except TooLargeError:  # beyond what is counted, and so beyond any memory
        return False


def longest(fits: Callable[[int], bool], step: int, *, most: int = MAX_SEQ_LENGTH) -> int:
    """The largest multiple of step that fits, where doubling and then bisecting finds it; or 0.

    All doublings are tried: where the loss head begins to go in tiles, more tokens can need less.
    """
    doublings = [step << i for i in range((most // step).bit_length())]
    fitting = [tokens for tokens in doublings if _fits(fits, tokens)]
    if not fitting:
        return 0
    low = fitting[-1] // step
    high = 2 * low  # does not fit, or is beyond what is asked
    if high * step > most:
        raise UserError(
            f"{most:,} tokens still fit into this budget: give the memory of one rank, such as "
            "76GiB"
        )
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(fits, middle * step):
            low = middle
        else:
            high = middle
    return low * step


def _used(outcome: Outcome) -> list[str]:
    choices = outcome.plan.layers.values()
    return sorted({name for c in choices for name in (c.attention, c.mlp)})


def _profiled(setup: Setup, names: Sequence[str], b: int) -> int:
    """The longest length at which all that these strategies do, and the edges, were timed at b.

    0 where something was not.
    """
    model = setup.policies.model
    wanted = {"model", *(part for name in names for part in names_of_costs(name))}
    fits = [fit for fit in model.fits if fit.strategy in wanted]
    fits = [fit for fit in fits if half_of(fit.operation) != LAYER]  # wholes are checks
    ranges = [model.timed_range(fit.strategy, fit.operation, b) for fit in fits]
    return min(0 if found is None else found[1] for found in ranges)
