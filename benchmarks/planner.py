"""Planning 15 strategies for attention and 15 for MLP on 96 layers: time, and brute force.

Costs are of the size of real ones: kept and workspace in units of s b h / p values as measured per
strategy, each also with recomputation, and with that and its input on the host; times with noise.
"adversarial" rows are costs without structure; "subset sums" are costs where every byte saved has
the same price, the hardest there are. "every other" and "one in six": layers of two kinds, of which
the second has an attention 0.3 times as long, as with a window.

    .venv/bin/python benchmarks/planner.py --json
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, options
from megatron_paradyse.planner import (
    CachedPlanner,
    Choice,
    LayerOptions,
    OptimalPlanner,
    Problem,
)
from tests.planner.brute_force import best_of_all, random_problem

NUM_LAYERS = 96
GIB = 2**30
# seconds of attention and MLP, kept and workspace of a half layer in units of s b h / p values
STRATEGIES = {
    "megatron_ts": (1.0, 1.0, 8, 16),
    "ulysses_z": (1.05, 1.15, 8.5, 3),
    "megatron_cz": (1.1, 1.2, 8.5, 20),
    "colossal_z": (1.6, 1.8, 20, 60),
    "metp": (1.35, 1.5, 2.5, 2.5),
}


def realistic(rng: random.Random) -> Problem:
    """A GPT of hidden size 8,192 on 8 ranks of 80 GiB, 4K to 1M tokens."""
    unit = int(2 ** rng.uniform(12, 20)) // 8 * 8192 * 2
    copy = rng.uniform(0.005, 0.3)  # seconds of an input to the host and back
    halves = []
    for half in range(2):
        choices = []
        for name, (*seconds, kept, workspace) in STRATEGIES.items():
            noise = [rng.uniform(0.98, 1.02) for _ in range(3)]
            time_, k, w = seconds[half] * noise[0], kept * noise[1], workspace * noise[2]
            choices.append(_choice(name, time_, k, w, unit))
            again = time_ * rng.uniform(1.28, 1.38)
            choices.append(_choice(f"{name}+recompute", again, 1, w + k - 1, unit))
            choices.append(_choice(f"{name}+offload", again + copy, 0, w + k, unit))
        halves.append(tuple(choices))
    pairs, same, untried = {}, {}, []
    for a, m in itertools.product(*halves):
        (_, plus, where), (base, too, other) = a.name.partition("+"), m.name.partition("+")
        if not plus or not too:
            untried += [(a.name, m.name)] if "offload" in (where, other) else []
            continue
        if where != other:  # the attention's name decides for the layer
            same[a.name, m.name] = (a.name, f"{base}+{where}")
            continue
        moved = a.name.endswith("+offload")
        both = a.seconds + m.seconds - copy * moved
        back = a.backward_bytes + m.backward_bytes - unit * moved
        stays = 0 if moved else unit
        pairs[a.name, m.name] = Choice(a.name, both, stays, 9 * unit - stays, back)
    options = LayerOptions(halves[0], halves[1], pairs, same, frozenset(untried))
    layers = dict.fromkeys(range(1, NUM_LAYERS + 1), options)
    return Problem(layers, 80 * GIB, base_bytes=20 * GIB, head_bytes=4 * unit, embedding_bytes=unit)


def of_two_kinds(rng: random.Random, *, every: int) -> Problem:
    """realistic(), with another attention in one layer of so many."""
    problem = realistic(rng)
    options = problem.layers[1]
    before = {choice.name: choice.seconds for choice in options.attention}
    attention = tuple(
        replace(choice, seconds=0.3 * choice.seconds * rng.uniform(0.97, 1.03))
        for choice in options.attention
    )
    after = {choice.name: choice.seconds for choice in attention}
    pairs = {
        names: replace(pair, seconds=pair.seconds - before[names[0]] + after[names[0]])
        for names, pair in options.pairs.items()
    }
    other = replace(options, attention=attention, pairs=pairs)
    layers = {n: other if n % every == 0 else options for n in problem.layers}
    return replace(problem, layers=layers)


def in_any_order(rng: random.Random) -> Problem:
    """of_two_kinds(), each layer one of them at random."""
    problem = of_two_kinds(rng, every=2)
    kinds = (problem.layers[1], problem.layers[2])
    return replace(problem, layers={number: rng.choice(kinds) for number in problem.layers})


def adversarial(rng: random.Random) -> Problem:
    return random_problem(rng, strategies=15, layers=NUM_LAYERS)


def subset_sums(rng: random.Random) -> Problem:
    def half():
        kept = [rng.randint(10**8, 10**9) for _ in range(10)]
        return tuple(
            Choice(f"s{i}", 10 - 5e-9 * k, k, 0, rng.randint(0, 10**9)) for i, k in enumerate(kept)
        )

    layers = dict.fromkeys(range(1, NUM_LAYERS + 1), LayerOptions(half(), half()))
    return Problem(layers, int(rng.uniform(30, 180) * 1e9))


def _choice(name: str, seconds: float, kept: float, workspace: float, unit: int) -> Choice:
    sizes = (int(unit * kept), int(unit * workspace / 2), int(unit * workspace))
    return Choice(name, seconds, *sizes)


def measure(make: Callable[[random.Random], Problem], count: int) -> dict:
    """Milliseconds per plan: wall and processor time, the best of five each."""
    planner = OptimalPlanner()
    rows: dict[str, list[float]] = {"uniform": [], "mixed": [], "over budget": []}
    processor = []
    gaps = []
    for seed in range(count):
        problem = make(random.Random(seed))
        times = []
        for _ in range(5):
            begin = time.perf_counter(), time.process_time()
            outcome = planner.plan(problem)
            times.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        wall, cpu = (min(column) * 1e3 for column in zip(*times, strict=True))
        mixed = len(set(outcome.plan.layers.values())) > 1
        kind = "over budget" if not outcome.fits else "mixed" if mixed else "uniform"
        rows[kind].append(wall)
        processor.append(cpu)
        assert outcome.bound_seconds is not None, "this planner proves one"
        gaps.append(1 - outcome.bound_seconds / outcome.seconds if outcome.seconds else 0)
    every = [value for values in rows.values() for value in values]
    kinds = {kind: _spread(values) for kind, values in rows.items() if values}
    unproven = sum(gap > 1e-9 for gap in gaps)
    return {
        "all": _spread(every),
        **kinds,
        "processor_time": _spread(processor),
        "unproven": unproven,
        "largest_gap": max(gaps),
    }


def _spread(values: list[float]) -> dict:
    values = sorted(values)
    return {
        "problems": len(values),
        "median": round(statistics.median(values), 4),
        "p95": round(values[int(0.95 * (len(values) - 1))], 4),
        "max": round(values[-1], 4),
    }


def cached_microseconds() -> float:
    problem = realistic(random.Random(0))
    cache = CachedPlanner(OptimalPlanner(), lambda b, s, forward_only: problem, alignment=64)
    for s in range(64, 6465, 64):
        cache.plan(1, s)
    begin = time.perf_counter()
    for _ in range(100):
        for s in range(50, 6450, 64):
            cache.plan(1, s)
    return (time.perf_counter() - begin) / 1e4 * 1e6


def mismatches(count: int) -> int:
    """Random problems whose optimum is not that of every plan tried."""
    wrong = 0
    for seed in range(count):
        rng = random.Random(10**6 + seed)
        problem = random_problem(
            rng,
            strategies=rng.randint(1, 3),
            layers=rng.randint(1, 3),
            granularity=rng.choice(["operation", "layer", "sequence"]),
            classes=rng.choice([1, 2]),
            coarse=rng.random() < 0.5,
        )
        fits, seconds, peak = best_of_all(problem)
        outcome = OptimalPlanner().plan(problem)
        same = abs(outcome.seconds - seconds) <= 1e-9 * max(seconds, 1)
        wrong += not (same and outcome.fits == fits and (fits or outcome.peak_bytes == peak))
    return wrong


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    count, instances = (40, 500) if arguments.quick else (300, 2000)
    rows = {
        "realistic": measure(realistic, count),
        "adversarial": measure(adversarial, count // 4),
        "subset_sums": measure(subset_sums, 5 if arguments.quick else 20),
        "every_other": measure(partial(of_two_kinds, every=2), 5 if arguments.quick else 40),
        "one_in_six": measure(partial(of_two_kinds, every=6), 5 if arguments.quick else 40),
        "any_order": measure(in_any_order, 5 if arguments.quick else 40),
    }
    result = {
        "cold_milliseconds": rows["realistic"]["all"]["median"],
        "cold_milliseconds_p95": rows["realistic"]["all"]["p95"],
        "cold_milliseconds_max": rows["realistic"]["all"]["max"],
        "cached_microseconds": round(cached_microseconds(), 3),
        "instances": instances,
        "mismatches": mismatches(instances),
        "rows": rows,
    }
    configuration = {"layers": NUM_LAYERS, "attention_choices": 15, "mlp_choices": 15}
    finish("planner", result, configuration, arguments)


if __name__ == "__main__":
    main()
