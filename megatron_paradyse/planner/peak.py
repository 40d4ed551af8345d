"""The peak of a plan: walk the layers forward and backward, or the same in closed form.

With K_i the bytes kept by operations 1..i, the forward of operation i peaks at K_i + forward_i and
its backward, which starts with the same live bytes, at K_i + backward_i. So the peak is

    base + max(embedding, max_i (K_i + max(forward_i, backward_i)), K_last + max(head, tail))

where base has gather_bytes besides if any operation of the plan gathers.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_paradyse.plan import Plan
from megatron_paradyse.planner.problem import Choice, Outcome, Problem


def operations(problem: Problem, plan: Plan) -> list[Choice] | None:
    """The costs of the plan in the order in which they run; None if a choice is not offered.

    A layer is two operations, or one where its pair has costs of its own.
    """
    run: list[Choice] = []
    for number in sorted(problem.layers):
        options, chosen = problem.layers[number], plan[number]
        attention = _named(options.attention, chosen.attention)
        mlp = _named(options.mlp, chosen.mlp)
        if attention is None or mlp is None:
            return None
        pair = options.pair(chosen.attention, chosen.mlp)
        run += [attention, mlp] if pair is None else [pair]
    return run


def walk(problem: Problem, run: Sequence[Choice]) -> list[int]:
    """The peak bytes during each step: embedding, forwards, loss head, backwards, embedding."""
    live = base_bytes(problem, run)
    peaks = [live + problem.embedding_bytes]
    for choice in run:
        live += 0 if problem.forward_only else choice.kept_bytes
        peaks.append(live + choice.forward_bytes)
    peaks.append(live + max(problem.head_bytes, problem.tail_bytes))
    if problem.forward_only:
        return peaks
    for choice in reversed(run):
        peaks.append(live + choice.backward_bytes)
        live -= choice.kept_bytes
    return [*peaks, live + problem.embedding_bytes]


def peak_bytes(problem: Problem, run: Sequence[Choice]) -> int:
    """The largest number of the walk, in one pass."""
    kept = peak = 0
    if problem.forward_only:
        peak = max(choice.forward_bytes for choice in run)
    else:
        for choice in run:
            kept += choice.kept_bytes
            workspace = max(choice.forward_bytes, choice.backward_bytes)
            if kept + workspace > peak:
                peak = kept + workspace
    above = max(peak, kept + problem.reserve_bytes, problem.embedding_bytes)
    return base_bytes(problem, run) + above


def base_bytes(problem: Problem, run: Sequence[Choice]) -> int:
    """What is live from beginning to end of this plan."""
    gathers = problem.gather_bytes and any(choice.gathers for choice in run)
    return problem.base_bytes + (problem.gather_bytes if gathers else 0)


def evaluate(problem: Problem, plan: Plan) -> Outcome | None:
    """What a given plan costs; None if it names a choice that the problem does not offer."""
    run = operations(problem, plan)
    if run is None:
        return None
    peak = peak_bytes(problem, run)
    seconds = sum(choice.seconds for choice in run)
    return Outcome(plan, seconds, peak, max(0, peak - problem.budget_bytes))


def with_margin(budget_bytes: int, margin: float) -> int:
    """The budget for estimated peaks, where a real peak may be (1 + margin) times its estimate."""
    if not 0 <= margin < 10:
        raise ValueError(f"the safety margin is a fraction such as 0.03, got {margin}")
    return int(budget_bytes / (1 + margin))


def _named(choices: Sequence[Choice], name: str) -> Choice | None:
    return next((choice for choice in choices if choice.name == name), None)
