"""One rank of benchmarks/dynamic_workload.py."""

from __future__ import annotations

import functools
import gc
import json
import os
import statistics
import time
from collections import defaultdict

from benchmarks.iterations import end_rank, say, seconds_of, start_rank, strategies_of
from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.policy import FixedPolicy
from megatron_paradyse.settings import Settings
from megatron_paradyse.strategies import RECOMPUTE

METP = "metp"
CHOOSING = "optimal", "heuristic"  # the policies that do


def main() -> None:
    task = json.loads(os.environ["DYNAMIC_WORKLOAD"])
    start_rank()
    end_rank(task["output"], Workload(task["costs"]).run(task))


class Workload:
    """One model, and every policy that trains it."""

    def __init__(self, costs: str):
        from megatron.training import get_args

        from megatron_paradyse.live_bytes import make_meter
        from megatron_paradyse.profiler import model as profiled

        self._costs = costs
        self._meter = make_meter()
        with self._meter:
            before = self._meter.live_bytes
            self._model = profiled.build_model(get_args().num_layers)
            profiled.step_without_microbatches(self._model)
            gc.collect()
            self._before = before
        self.policies: dict = {}
        self.choosing: dict[str, list[float]] = defaultdict(list)  # seconds, by policy

    def run(self, task: dict) -> dict:
        documents = [self.padded(length) for length in task["lengths"]]
        names = strategies_of(read_cost_file(self._costs).require_model())
        bases = [name for name in names if not name.endswith(RECOMPUTE)]
        self.policies = {name: FixedPolicy(name) for name in names}
        say(f"{len(documents)} documents of {min(documents)} to {max(documents)} tokens")
        fastest = self._fastest(bases, documents)
        limit = self.padded(int(task["share"] * max(documents)))
        self.budget = self.peak(fastest, limit)
        say(f"fastest {fastest}; budget {self.budget:,.0f} bytes, its peak at {limit} tokens")
        runs = {name: self._longest(name, documents) for name in names}
        self.policies |= {
            "optimal": self.chooser("optimal"),
            "heuristic": self.chooser("heuristic"),
        }
        seconds = self._train(documents, runs, task["rounds"])
        result = self._compare(documents, runs, seconds, fastest, bases)
        result |= {"fastest_capacity_share": limit / max(documents)}
        tail = [self.padded(int(share * limit)) for share in task["tail"]]
        return result | self._tail(tail, fastest, task["tail_rounds"])

    def chooser(self, policy: str, **settings):
        """A policy as a training would make it, with the enforced budget."""
        from megatron.core.utils import unwrap_model
        from megatron.training import get_args

        from megatron_paradyse.train.choosing import CostPolicies

        budget = f"{int(self.budget)}B"
        chosen = Settings(
            policy=policy,
            cost_model=self._costs,
            memory_budget=budget,
            accept_costs=True,
            **settings,
        )
        chunks = [unwrap_model(chunk) for chunk in self._model.chunks]
        return CostPolicies(chosen, get_args()).policy_of(chunks[0].decoder, chunks)

    def padded(self, length: int) -> int:
        from megatron_paradyse.profiler.operations import tensor_parallel_size

        step = 2 * tensor_parallel_size()
        return -(-length // step) * step

    # -- single iterations

    def _choose(self, policy: str, length: int) -> float:
        """Let the policy choose this iteration's plan; its seconds."""
        from megatron.training import get_args

        start = time.perf_counter()
        layers = range(1, get_args().num_layers + 1)
        self._model.policy.chosen = self.policies[policy].plan(1, length, tuple(layers))
        return time.perf_counter() - start

    def chosen_runs(self) -> str:
        """The plan that a policy chose last."""
        plan = self._model.policy.chosen
        assert plan is not None, "a policy has chosen"
        return plan.runs()

    def _step(self, policy: str, length: int) -> None:
        self.choosing[policy].append(self._choose(policy, length))
        from megatron_paradyse.profiler.iterations import train_one

        train_one(self._model, length)

    def seconds(self, policy: str, length: int) -> float:
        """One iteration on a document, the choice included; the slowest rank's."""
        return seconds_of(functools.partial(self._step, policy, length))

    def peak(self, policy: str, length: int) -> float:
        """Bytes alive at most during an iteration, everything included; the largest rank's."""
        from megatron.core.parallel_state import get_global_memory_buffer

        from megatron_paradyse.profiler.model import largest_over_ranks

        with self._meter:
            get_global_memory_buffer().buffer.clear()  # it has the length of another document
            gc.collect()
            self._meter.reset_peak()
            self._step(policy, length)
            return largest_over_ranks([self._meter.peak_bytes - self._before])[0]

    # -- the workload

    def _fastest(self, bases: list[str], documents: list[int]) -> str:
        """Of the five: least time for the documents up to half the longest."""
        lengths = sorted(d for d in set(documents) if d <= max(documents) / 2)[-6:]
        total: dict = defaultdict(float)
        for length in lengths:
            for name in bases:
                times = [self.seconds(name, length) for _ in range(2)]
                total[name] += min(times)
        return min(bases, key=lambda name: total[name])

    def _longest(self, name: str, documents: list[int]) -> int:
        """The longest document whose measured peak is within the budget; 0 if none."""
        lengths = sorted(set(documents))
        low, high = 0, len(lengths)  # the first `low` fit
        while low < high:
            middle = (low + high + 1) // 2
            if self.peak(name, lengths[middle - 1]) <= self.budget:
                low = middle
            else:
                high = middle - 1
        longest = lengths[low - 1] if low else 0
        say(f"{name} runs up to {longest} tokens")
        return longest

    def _train(self, documents: list[int], runs: dict, rounds: int) -> dict:
        """policy -> seconds per round and document, None where it does not fit."""
        for length in sorted(set(documents))[:: max(1, len(documents) // 4)]:
            for name in self.policies:  # warm up
                if length <= runs.get(name, length):
                    self.seconds(name, length)
        self.choosing.clear()
        seconds: dict = {name: [[] for _ in documents] for name in self.policies}
        for turn in range(rounds):
            for index, length in enumerate(documents):
                order = list(self.policies)
                shift = (turn + index) % len(order)
                for name in order[shift:] + order[:shift]:
                    if length <= runs.get(name, length):
                        seconds[name][index].append(self.seconds(name, length))
            say(f"round {turn + 1} of {rounds}")
        return seconds

    def _compare(self, documents, runs, seconds, fastest, bases) -> dict:
        medians = {
            name: [statistics.median(times) if times else None for times in per_document]
            for name, per_document in seconds.items()
        }
        totals = {name: _sum(values) for name, values in medians.items()}
        peaks = {name: self._peaks(name, documents) for name in CHOOSING}
        fixed = {name: totals[name] for name in runs}
        finishing = {name: total for name, total in fixed.items() if total is not None}
        five = [total for name, total in finishing.items() if name in bases]
        fitting = [i for i, length in enumerate(documents) if length <= runs[fastest]]
        best = [
            min((m for name in runs if (m := medians[name][i]) is not None), default=None)
            for i in range(len(documents))
        ]
        oracle = _sum(best)
        ours, heuristic = totals["optimal"], totals["heuristic"]
        assert ours is not None and heuristic is not None, "both run every document"
        of_ours, of_fastest = (_sum([medians[n][i] for i in fitting]) for n in ("optimal", fastest))
        assert of_ours is not None and of_fastest is not None, "both run these"
        result = {
            "documents": len(documents),
            "finished": sum(peak <= self.budget for peak in peaks["optimal"]),
            "finished_heuristic": sum(peak <= self.budget for peak in peaks["heuristic"]),
            "peak_over_budget": max(peaks["optimal"]) / self.budget,
            "budget_bytes": self.budget,
            "fastest": fastest,
            "fastest_longest_share": runs[fastest] / max(documents),
            "ratio_to_best_fixed": ours / min(five) if five else None,
            "ratio_to_best_fixed_recompute": ours / min(finishing.values()) if finishing else None,
            "ratio_to_oracle": ours / oracle if oracle else None,
            "ratio_to_fastest_where_it_fits": of_ours / of_fastest,
            "heuristic_over_optimal": heuristic / ours,
            "switch_overhead": switch_overhead(self.choosing, seconds),
            "optimal_seconds": ours,
            "oracle_seconds": oracle,
            "fixed": {name: "oom" if total is None else total for name, total in fixed.items()},
            "longest": runs,
            "noise": _noise(seconds),
        }
        return result | {"rows": self._rows(documents, medians)}

    def _peaks(self, name: str, documents: list[int]) -> list[float]:
        known = {length: self.peak(name, length) for length in sorted(set(documents))}
        return [known[length] for length in documents]

    def _rows(self, documents: list[int], medians: dict) -> list[dict]:
        rows = []
        for index, length in enumerate(documents):
            self._choose("optimal", length)
            rows.append(
                {"s": length, "plan": self.chosen_runs()}
                | {n: v[index] for n, v in medians.items()}
            )
        return rows

    def _tail(self, lengths: list[int], fastest: str, rounds: int) -> dict:
        """Beyond the fastest strategy: the simple rule, uniform plans, layers and operations."""
        names = ("sequence", "layer", "operation")
        self.policies |= {name: self.chooser("optimal", granularity=name) for name in names}
        rows = []
        for length in lengths:
            rule = self._simple_rule(fastest, length)
            running = {"rule": rule} | {name: name for name in names}
            fitting = {
                key: policy
                for key, policy in running.items()
                if policy is not None and self.peak(policy, length) <= self.budget
            }
            times: dict = {key: [] for key in running}
            for _ in range(rounds):
                for key, policy in fitting.items():
                    times[key].append(self.seconds(policy, length))
            row: dict = {"s": length, "rule": rule}
            for key in running:
                row[f"{key}_seconds"] = statistics.median(times[key]) if times[key] else "oom"
            self._choose("operation", length)
            row["plan"] = self.chosen_runs()
            rows.append(row)
            say(json.dumps(row))
        return {
            "tail_ratio_to_simple_rule": _ratio(rows, "operation", "rule"),
            "tail_mixing_ratio": _ratio(rows, "operation", "sequence"),
            "tail_layer_mixing_ratio": _ratio(rows, "layer", "sequence"),
            "tail_operation_over_layer": _ratio(rows, "operation", "layer"),
            "tail": rows,
        }

    def _simple_rule(self, fastest: str, length: int) -> str | None:
        """The fastest strategy, else METP, else METP+recompute, whatever fits first."""
        for name in (fastest, METP, METP + RECOMPUTE):
            if name in self.policies and self.peak(name, length) <= self.budget:
                return name
        return None


def _sum(values: list[float | None]) -> float | None:
    """None where one of them is."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def switch_overhead(
    choosing: dict[str, list[float]], seconds: dict[str, list[list[float]]]
) -> float:
    """Seconds of choosing over those of iterations, of the policies that choose."""
    chose = sum(sum(choosing[name]) for name in CHOOSING)
    return chose / sum(sum(map(sum, seconds[name])) for name in CHOOSING)


def _noise(seconds: dict) -> float:
    """Median over policies and documents of the spread of repetitions."""
    spreads = [
        (max(times) - min(times)) / statistics.median(times)
        for per_document in seconds.values()
        for times in per_document
        if len(times) > 1
    ]
    return statistics.median(spreads) if spreads else 0.0


def _ratio(rows: list[dict], name: str, other: str) -> list[float | None]:
    """Per length; None where one of the two does not fit."""
    found = []
    for row in rows:
        a, b = row[f"{name}_seconds"], row[f"{other}_seconds"]
        found.append(None if "oom" in (a, b) else a / b)
    return found


if __name__ == "__main__":
    main()
