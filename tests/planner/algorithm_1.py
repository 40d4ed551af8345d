"""Algorithm 1 of the paper, transcribed step by step from its description. Shares no code."""

from __future__ import annotations

from megatron_paradyse.planner.problem import Problem
from tests.planner.brute_force import cost


def algorithm_1(problem: Problem) -> tuple[float, int, bool]:
    """(seconds, peak, fits) of the plan that it chooses, for layers that share a strategy."""
    layers = [problem.layers[number] for number in sorted(problem.layers)]
    common = None
    for options in layers:
        for half in (options.attention, options.mlp):
            if len(half) > 1:
                names = {choice.name for choice in half}
                common = names if common is None else common & names

    def costs_of(names):
        assignment = []
        for options, name in zip(layers, names, strict=True):
            halves = []
            for half in (options.attention, options.mlp):
                halves.append(half[0] if len(half) == 1 else {c.name: c for c in half}[name])
            assignment.append((options, *halves))
        return cost(problem, assignment)

    num_layers = len(layers)
    time, memory = {}, {}
    for name in sorted(common or {"only"}):
        time[name], memory[name] = costs_of([name] * num_layers)
    # 1. sort by time, drop what is worse in both
    order = sorted(time, key=lambda name: time[name])
    order = [
        name
        for name in order
        if not any(time[o] < time[name] and memory[o] < memory[name] for o in order)
    ]
    # 3. the fastest, if it fits
    if memory[order[0]] <= problem.budget_bytes:
        return time[order[0]], memory[order[0]], True
    # 4. candidates
    candidates = [(time[n], memory[n]) for n in order if memory[n] <= problem.budget_bytes]
    for i, first in enumerate(order):
        if memory[first] <= problem.budget_bytes or problem.granularity == "sequence":
            continue
        for rest in order[i + 1 :]:
            for m in range(1, num_layers):
                mixed = costs_of([first] * m + [rest] * (num_layers - m))
                if mixed[1] <= problem.budget_bytes:
                    candidates.append(mixed)
    if candidates:
        return (*min(candidates), True)
    least = min(order, key=lambda name: (memory[name], time[name]))
    return time[least], memory[least], False
