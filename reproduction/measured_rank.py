"""One rank of reproduction/measured.py: one model, and every policy that trains it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import statistics
from pathlib import Path
from typing import Any

from benchmarks.dynamic_workload_rank import Workload
from benchmarks.iterations import end_rank, say, start_rank
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.policy import FixedPolicy
from megatron_paradyse.preview.longest import find_longest
from megatron_paradyse.preview.setup import make_setup
from megatron_paradyse.strategies import RECOMPUTE, base_name, strategy_names
from reproduction.frameworks import Ran, until_out_of_memory, without_forest
from reproduction.table5 import contribution

FASTEST_REACHES = 0.425  # of the longest document, where memory is enforced
ORDERS = ("sorted", "shuffled")
PUBLISHED = {"policy": "heuristic", "granularity": "layer", "strategies": strategy_names()}
REPETITIONS = 3
CHOOSING, CHOICES = "optimal", 16  # the policy whose choices are timed, and how many


def main() -> None:
    task = json.loads(os.environ["REPRODUCTION"])
    start_rank()

    trained = Trained(task)
    result = getattr(trained, task["what"])()
    end_rank(task["output"], result)


class Trained(Workload):
    """The model of a task, trained on its documents by fixed strategies and by cost."""

    def __init__(self, task: dict):
        super().__init__(task["costs"])
        self._task = task
        lengths = task.get("lengths", {})
        self._documents = {
            name: sorted(self.padded(length) for length in drawn) for name, drawn in lengths.items()
        }
        self.policies = {name: FixedPolicy(name) for name in strategy_names()}
        self._chosen_by: dict[str, tuple[str, dict[str, Any]]] = {}
        self._enforced = task["budget"] is None
        if not self._enforced:
            self.budget = _device_bytes()
        elif self._documents:
            every = next(iter(self._documents.values()))
            fastest = self._fastest(list(strategy_names()), every)
            self.budget = self.peak(fastest, self.padded(int(FASTEST_REACHES * every[-1])))
            say(f"fastest {fastest}; memory {self.budget:,.0f} bytes")

    # -- figure 2

    def figure2(self) -> list[dict]:
        """A row for each order, document and policy; without seconds where it does not fit."""
        for name in self._task["policies"]:
            published = name.endswith("published")
            settings = dict(PUBLISHED) if published else {"policy": "optimal"}
            costs = self._published_costs() if published else self._costs
            self._chosen_by[name] = (costs, settings)
            self.policies[name] = self._chooser(costs, settings)
        return [
            {"distribution": name, **row}
            for name, documents in self._documents.items()
            for row in self._panel(documents)
        ]

    def _panel(self, documents: list[int]) -> list[dict]:
        fits = {name: self._fitting(name, documents) for name in self.policies}
        for name, lengths in fits.items():
            running = sum(length in lengths for length in documents)
            say(f"{name} runs {running} of {len(documents)} documents")
            for length in list(lengths)[:2]:
                self.seconds(name, length)  # warm up
        rows = []
        shuffled = random.Random(0).sample(documents, len(documents))
        for order, sequence in zip(ORDERS, (documents, shuffled), strict=True):
            for name in self._chosen_by:
                self.policies[name].forget()
            for index, length in enumerate(sequence):
                names = list(self.policies)
                shift = index % len(names)
                for name in names[shift:] + names[:shift]:
                    fitting = length in fits[name]
                    row = {"order": order, "policy": name, "document": index, "tokens": length}
                    row["seconds"] = self.seconds(name, length) if fitting else None
                    row["peak_bytes"] = fits[name].get(length)
                    chooses = fitting and not isinstance(self.policies[name], FixedPolicy)
                    row["plan"] = self.chosen_runs() if chooses else ""
                    rows.append(row)
            say(f"{order}: {len(sequence)} documents")
        return rows

    def _fitting(self, name: str, documents: list[int]) -> dict[int, float | None]:
        """Measured peak bytes by length, where known, of the documents that fit into the budget.

        Fixed strategies need more for longer documents: their limit is found by bisection. On a
        GPU limits are predicted, and nothing beyond them is tried: running out of memory there
        would end the benchmark.
        """
        lengths = sorted(set(documents))
        if not self._enforced:
            limit = self._predicted_limit(name)
            return {length: None for length in lengths if length <= limit}
        if not isinstance(self.policies[name], FixedPolicy):
            peaks = {length: self.peak(name, length) for length in lengths}
            return {length: peak for length, peak in peaks.items() if peak <= self.budget}
        found: dict[int, float | None] = {}
        low, high = 0, len(lengths)
        while low < high:
            middle = (low + high + 1) // 2
            peak = self.peak(name, lengths[middle - 1])
            found[lengths[middle - 1]] = peak
            low, high = (middle, high) if peak <= self.budget else (low, middle - 1)
        return {length: found.get(length) for length in lengths[:low]}

    def _predicted_limit(self, name: str) -> int:
        """The longest sequence that the cost file says fits."""
        costs, settings = self._chosen_by.get(name, (self._costs, {"policy": "optimal"}))
        given = {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()}
        settings = {**given, "memory_budget": f"{int(self.budget)}B", "accept_costs": True}
        found = find_longest(make_setup(costs, settings))
        if name in self._chosen_by:
            return found.paradyse.tokens
        return next(limit.tokens for limit in found.single if limit.strategy == name)

    # -- table 5

    def table5(self) -> list[dict]:
        """Frameworks with a part left out, over the same documents; distinct plans run once."""
        ((_, documents),) = self._documents.items()
        plans = {}
        for name, (costs, settings) in self._frameworks().items():
            policy = self._chooser(costs, settings)
            layers = tuple(range(1, self._num_layers() + 1))
            plans[name] = [policy.plan(1, length, layers) for length in documents]
        wanted = {
            (index, plan.runs()): plan
            for planned in plans.values()
            for index, plan in enumerate(planned)
        }
        say(f"{len(wanted)} plans of {len(documents)} documents")
        peaks = {
            key: self._peak_of(plan, documents[key[0]]) if self._enforced else 0
            for key, plan in wanted.items()
        }
        times: dict = {key: [] for key in wanted}
        for turn in range(REPETITIONS):
            for key, plan in wanted.items():
                if peaks[key] <= self.budget:
                    times[key].append(self._seconds_of(plan, documents[key[0]]))
            say(f"round {turn + 1} of {REPETITIONS}")
        seconds = {key: statistics.median(found) for key, found in times.items() if found}
        per_document = {
            name: [seconds.get((i, plan.runs())) for i, plan in enumerate(planned)]
            for name, planned in plans.items()
        }
        done = {
            name: until_out_of_memory(map(Ran, documents, found, itertools.repeat(0)))
            for name, found in per_document.items()
        }
        return [
            {
                "framework": name,
                "max_tokens": ran[-1].tokens if ran else 0,
                **contribution(done["full"], ran),
            }
            for name, ran in done.items()
        ]

    def _frameworks(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Name -> cost file and settings."""
        everything = [n for base in strategy_names() for n in (base, base + RECOMPUTE)]
        frameworks: dict[str, tuple[str, dict[str, Any]]]
        frameworks = {"full": (self._costs, {"policy": "optimal"})}
        for left_out in strategy_names():
            kept = tuple(n for n in everything if base_name(n) != left_out)
            frameworks[f"without {left_out}"] = (
                self._costs,
                {"policy": "optimal", "strategies": kept},
            )
        published = self._published_costs()
        polynomials = self._refitted("polynomials", "hybrid", without_forest)
        return frameworks | {
            "without the forest": (polynomials, {"policy": "optimal"}),
            "without mixing": (self._costs, {"policy": "optimal", "granularity": "sequence"}),
            "layers for operations": (self._costs, {"policy": "optimal", "granularity": "layer"}),
            "without recompute": (
                self._costs,
                {"policy": "optimal", "strategies": strategy_names()},
            ),
            "heuristic for optimal": (self._costs, {"policy": "heuristic"}),
            "as published": (published, dict(PUBLISHED)),
            "as published, without smoothing": (
                published,
                {**PUBLISHED, "policy": "heuristic:no-smoothing"},
            ),
        }

    # -- the case study

    def switch(self) -> dict[str, float]:
        """Seconds that a change of strategy adds to an iteration, and of choosing a plan.

        choosing: by cost, for a length not seen before. alternating: two strategies in turn, over
        each for itself in pairs; below 0 by noise alone.
        """
        length, iterations = self._task["length"], self._task["iterations"]
        names = ("megatron_ts", "ulysses_z")
        for name in names * 2:
            self.seconds(name, length)
        alternating, paired = [], []
        for _ in range(iterations // 4):
            alternating += [self.seconds(name, length) for name in (*names, *names)]
            self.seconds(names[0], length)  # the first of a pair follows itself too
            for name in names:
                self.seconds(name, length)
                paired += [self.seconds(name, length), self.seconds(name, length)]
        added = statistics.median(alternating) - statistics.median(paired)
        choosing = self._seconds_to_choose(names[0], length)
        return {
            "choosing": choosing,
            "alternating": added,
            "switch": max(added, 0.0) + choosing,
            "iteration": statistics.median(paired),
        }

    def _seconds_to_choose(self, name: str, length: int) -> float:
        """Of a plan by cost, for its first microbatch: the median, up to five times a length.

        Memory is enforced at what the named strategy needs for that length.
        """
        if self._enforced:
            self.budget = self.peak(name, length)
        self.policies[CHOOSING] = self._chooser(self._costs, {"policy": CHOOSING})
        longer = (length + i * length // 4 for i in range(1, CHOICES + 1))
        return statistics.median(self._choose(CHOOSING, tokens) for tokens in longer)

    # -- what all use

    def _chooser(self, costs: str, settings: dict):
        own, self._costs = self._costs, costs
        try:
            return self.chooser(**settings)
        finally:
            self._costs = own

    def _published_costs(self) -> str:
        """The same measurements with the paper's fit."""
        return self._refitted("published", "paper", lambda model: model)

    def _refitted(self, name: str, kind: str, change) -> str:
        import torch

        path = Path(self._task["output"]).with_name(f"{name}.json")
        if torch.distributed.get_rank() == 0:
            table = read_cost_file(self._costs).table
            write_cost_file(str(path), table, change(fit_table(table, kind)))
        torch.distributed.barrier()
        return str(path)

    def _num_layers(self) -> int:
        from megatron.training import get_args

        return get_args().num_layers

    def _peak_of(self, plan, length: int) -> float:
        self.policies["given"] = _Given(plan)
        return self.peak("given", length)

    def _seconds_of(self, plan, length: int) -> float:
        self.policies["given"] = _Given(plan)
        return self.seconds("given", length)


@dataclasses.dataclass(frozen=True)
class _Given:
    """A policy of one plan."""

    chosen: Any

    def plan(self, *_: Any, **__: Any):
        return self.chosen


def _device_bytes() -> float:
    import torch

    return 0.95 * torch.cuda.mem_get_info()[1]


if __name__ == "__main__":
    main()
