"""What the planners are held to: every plan, or every useful prefix. No shared code."""

from __future__ import annotations

import itertools
import random

from megatron_paradyse.planner.problem import Choice, LayerOptions, Problem


def allowed_pairs(problem: Problem, options: LayerOptions):
    """[(attention choice, mlp choice)] by the rule of the granularity."""
    for attention in options.attention:
        for mlp in options.mlp:
            if problem.granularity == "operation" and (attention.name, mlp.name) in options.untried:
                continue
            one_is_fixed = len(options.attention) == 1 or len(options.mlp) == 1
            if problem.granularity == "operation" or one_is_fixed or attention.name == mlp.name:
                yield attention, mlp


def steps_of(options: LayerOptions, attention: Choice, mlp: Choice):
    names = (attention.name, mlp.name)
    own = options.pairs.get(options.same.get(names, names))
    return [own] if own else [attention, mlp]


def cost(problem: Problem, assignment) -> tuple[float, int]:
    """(seconds, peak) of [(options, attention, mlp)] by walking forward and back."""
    steps = [step for item in assignment for step in steps_of(*item)]
    live = problem.base_bytes
    peak = live + problem.embedding_bytes
    for step in steps:
        live += 0 if problem.forward_only else step.kept_bytes
        peak = max(peak, live + step.forward_bytes)
    peak = max(peak, live + problem.head_bytes, live + problem.tail_bytes)
    if not problem.forward_only:
        for step in reversed(steps):
            peak = max(peak, live + step.backward_bytes)
            live -= step.kept_bytes
        assert live == problem.base_bytes
    return sum(step.seconds for step in steps), peak


def every_assignment(problem: Problem):
    layers = [problem.layers[number] for number in sorted(problem.layers)]
    if problem.granularity == "sequence":
        names = {c.name for options in layers for c in (*options.attention, *options.mlp)}
        for name in sorted(names):
            halves = [
                [
                    next((c for c in half if c.name == name or len(half) == 1), None)
                    for half in (options.attention, options.mlp)
                ]
                for options in layers
            ]
            if all(c is not None for pair in halves for c in pair):
                yield [(o, *pair) for o, pair in zip(layers, halves, strict=True)]
        return
    options = [[(o, a, m) for a, m in allowed_pairs(problem, o)] for o in layers]
    yield from itertools.product(*options)


def best_of_all(problem: Problem) -> tuple[bool, float, int]:
    """(fits, seconds, peak) of the best plan: fastest that fits, or least peak, then fastest."""
    costs = [cost(problem, assignment) for assignment in every_assignment(problem)]
    fitting = [c for c in costs if c[1] <= problem.budget_bytes]
    if fitting:
        seconds, peak = min(fitting)
        return True, seconds, peak
    least = min(peak for _, peak in costs)
    return False, min(seconds for seconds, peak in costs if peak == least), least


def best_of_prefixes(problem: Problem, budget: int) -> float | None:
    """The fastest plan within a budget, layer by layer over all useful prefixes.

    Not for granularity sequence.
    """
    prefixes = {0: 0.0}
    keeps = not problem.forward_only
    for number in sorted(problem.layers):
        options = problem.layers[number]
        longer: dict[int, float] = {}
        for attention, mlp in allowed_pairs(problem, options):
            steps = steps_of(options, attention, mlp)
            for kept, seconds in prefixes.items():
                peak = 0
                for step in steps:
                    kept += step.kept_bytes if keeps else 0
                    peak = max(peak, kept + step.forward_bytes)
                    peak = max(peak, kept + step.backward_bytes if keeps else 0)
                    seconds += step.seconds
                if problem.base_bytes + peak <= budget:
                    longer[kept] = min(seconds, longer.get(kept, float("inf")))
        prefixes, fastest = {}, float("inf")
        for kept in sorted(longer):
            if longer[kept] < fastest:
                fastest = prefixes[kept] = longer[kept]
    reserve = max(problem.head_bytes, problem.tail_bytes)
    fitting = [t for kept, t in prefixes.items() if problem.base_bytes + kept + reserve <= budget]
    return min(fitting, default=None)


def random_problem(
    rng: random.Random,
    *,
    strategies: int,
    layers: int,
    granularity: str = "operation",
    classes: int = 1,
    forward_only: bool = False,
    coarse: bool = False,
) -> Problem:
    """Costs without any structure; coarse ones have many ties and zeros."""
    most = rng.choice([3, 12]) if coarse else rng.choice([100, 10**6])
    names = [f"s{i}" for i in range(strategies)]

    def choice(name: str) -> Choice:
        seconds = float(rng.randint(0, most)) if coarse else rng.uniform(0.5, 2)
        sizes = [rng.randint(0, most) for _ in range(3)]
        spread = rng.choice([1, 4])
        return Choice(name, seconds, sizes[0], sizes[1] * spread, sizes[2] * spread)

    def options() -> LayerOptions:
        halves = []
        for _ in range(2):
            kept = [name for name in names if classes == 1 or rng.random() < 0.7]
            halves.append(tuple(choice(name) for name in kept or names[:1]))
        # granularity layer and sequence need a strategy in common
        if granularity != "operation":
            halves = [
                half if len(half) == 1 or half[0].name == names[0] else (choice(names[0]), *half)
                for half in halves
            ]
        pairs = {}
        if rng.random() < 0.4:
            pairs = {
                (a.name, m.name): choice("pair")
                for a in halves[0]
                for m in halves[1]
                if rng.random() < 0.3
            }
        return LayerOptions(halves[0], halves[1], pairs)

    kinds = [options() for _ in range(classes)]
    chosen = {n + 1: rng.choice(kinds) for n in range(layers)}
    sizes = [rng.randint(0, most) for _ in range(4)]
    problem = Problem(chosen, 0, *sizes, granularity=granularity, forward_only=forward_only)
    peaks = [cost(problem, a)[1] for a in itertools.islice(_samples(problem, rng), 24)]
    budget = rng.randint(int(0.7 * min(peaks)), max(peaks))
    return Problem(chosen, budget, *sizes, granularity=granularity, forward_only=forward_only)


def _samples(problem: Problem, rng: random.Random):
    if problem.granularity == "sequence":
        yield from every_assignment(problem)
        return
    layers = [problem.layers[number] for number in sorted(problem.layers)]
    pairs = {id(o): list(allowed_pairs(problem, o)) for o in layers}
    while True:
        yield [(o, *rng.choice(pairs[id(o)])) for o in layers]
