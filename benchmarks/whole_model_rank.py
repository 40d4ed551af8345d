"""One rank of benchmarks/whole_model.py."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import statistics
import time

from benchmarks.iterations import end_rank, say, seconds_of, start_rank
from megatron_paradyse.costs.table import MODEL, OperationCosts
from megatron_paradyse.plan import LayerChoice, Plan
from megatron_paradyse.planner import evaluate
from megatron_paradyse.planner.from_costs import Stage, cost_source, model_seconds, stage_memory
from megatron_paradyse.planner.policies import OperationsOf, OptimalPolicy
from megatron_paradyse.planner.problem import Outcome
from megatron_paradyse.strategies import RECOMPUTE, strategy_names

TURN_SECONDS = 0.3


def main() -> None:
    task = json.loads(os.environ["WHOLE_MODEL"])
    args = start_rank()

    from megatron_paradyse.live_bytes import make_meter
    from megatron_paradyse.profiler import model as profiled
    from megatron_paradyse.train.model_layers import ModelLayers, count_layers
    from megatron_paradyse.train.static_bytes import waiting_gradient_bytes

    num_layers = count_layers(args)
    layers = ModelLayers.of_arguments(args, num_layers)
    meter = make_meter()
    model, constants = profiled.build_and_measure(
        num_layers, meter, longest_tokens=max(task["lengths"])
    )
    buffer_bytes = max(task["lengths"]) * args.hidden_size * args.params_dtype.itemsize
    del model
    gc.collect()
    model, before, static_bytes = profiled.build_under(meter, layers)
    own = constants.static_bytes - waiting_gradient_bytes(model.chunks[0]) - buffer_bytes
    check = Check(model, meter, before - buffer_bytes, constants)
    rows = []
    for index, length in enumerate(task["lengths"]):
        plans = plans_at(index, num_layers, task["plans"])
        for row in check.compare(length, plans, task["rounds"]):
            rows.append(row)
            say(json.dumps(row))
    end_rank(task["output"], {"rows": rows, "static_error": own / static_bytes - 1})


def plans_at(index: int, num_layers: int, count: int) -> list[Plan]:
    """Uniform plans and mixes over layers and operations, others at every length."""
    bases = strategy_names()
    names = [name for base in bases for name in (base, base + RECOMPUTE)]
    numbers = range(1, num_layers + 1)

    def plan(choose) -> Plan:
        return Plan({i: LayerChoice(*choose(i)) for i in numbers})

    kinds = [
        plan(lambda i: (bases[index % len(bases)],) * 2),
        plan(lambda i: (names[(i + index) % len(names)], names[(3 * i + index) % len(names)])),
        plan(lambda i: (names[(2 * index + 1) % len(names)],) * 2),
        plan(lambda i: (names[(3 * i + index) % len(names)],) * 2),
        plan(lambda i: (bases[(i + index) % len(bases)], bases[(2 * i + index) % len(bases)])),
    ]
    return (kinds * count)[:count]


class Check:
    """Measures operations and whole iterations of one model, in turns."""

    def __init__(self, model, meter, before_bytes: int, constants):
        self._model, self._meter = model, meter
        self._operations = model.layers.kinds().operations
        config, rotates = model.config, hasattr(model.gpt, "rotary_pos_emb")
        input_bytes = config.hidden_size * config.params_dtype.itemsize
        self._stage = Stage(
            budget_bytes=1 << 62,
            static_bytes=int(constants.static_bytes),
            angle_bytes_per_position=4 * config.kv_channels if rotates else 0,
            num_predicting=model.layers.num_predicting,
            input_bytes_per_token=input_bytes / config.tensor_model_parallel_size,
        )
        self._before_bytes, self._static_bytes = before_bytes, constants.static_bytes
        self._optimizer_bytes = constants.optimizer_bytes

    def compare_bytes(self, length: int, plans: list[Plan]) -> list[tuple[str, float, float]]:
        """Of every plan's iteration: its runs, predicted and measured peak bytes."""
        costs = {
            key: OperationCosts(*once, **dataclasses.asdict(sizes))
            for key, (sizes, once) in self._measure(length, plans).items()
        }
        return [
            (plan.runs(), self._predicted(plan, length, costs)[1], self._peak(plan, length))
            for plan in plans
        ]

    def compare_evaluations(self, length: int, plans: list[Plan]) -> list[tuple[str, float, float]]:
        """The same of forwards without gradient; plans: of halves that all recompute."""
        costs = {
            key: OperationCosts(*once, **dataclasses.asdict(sizes))
            for key, (sizes, once) in self._measure(length, plans).items()
        }
        return [
            (
                plan.runs(),
                self._outcome(plan, length, costs, forward_only=True).peak_bytes,
                self._peak(plan, length, forward_only=True),
            )
            for plan in plans
        ]

    def _measure(self, length: int, plans: list[Plan]) -> dict:
        """Bytes, and seconds under the meter, of all operations that the plans need."""
        from megatron_paradyse.profiler.measure import measure_bytes
        from megatron_paradyse.profiler.operations import Operations

        with self._meter:
            operations = Operations(self._model, length, 1)
        needed = sorted(_needed(plans, self._operations) | self._edges.keys())
        runs = {key: operations.get(key[1], key[0]) for key in needed}
        measured = {key: measure_bytes(run, self._meter) for key, run in runs.items()}
        runs.clear()
        del operations
        gc.collect()
        return measured

    @property
    def _edges(self) -> dict[tuple[str, str], int]:
        return {(MODEL, edge): count for edge, count in self._stage.edges.items()}

    def compare(self, length: int, plans: list[Plan], rounds: int) -> list[dict]:
        measured_once = self._measure(length, plans)
        self._runs = {key: _num_runs(sum(once)) for key, (_, once) in measured_once.items()}
        needed = list(measured_once)
        peaks = [self._peak(plan, length) for plan in plans]
        seconds, optimizer, iterations, busy = self._seconds(needed, plans, length, rounds)
        costs = {
            key: OperationCosts(*seconds[key], **dataclasses.asdict(sizes))
            for key, (sizes, _) in measured_once.items()
        }
        rows = []
        for number, (plan, peak, times) in enumerate(zip(plans, peaks, iterations, strict=True)):
            layer_seconds, expected_peak = self._predicted(plan, length, costs)
            predicted = layer_seconds + optimizer
            measured = statistics.median(times)
            parts = ["step", *plan.halves(self._operations)]
            processor = sum(busy[part] for part in parts)
            processor += sum(count * busy[edge] for edge, count in self._edges.items())
            rows.append(
                {
                    "s": length,
                    "plan": plan.runs(),
                    "predicted_seconds": predicted,
                    "measured_seconds": measured,
                    "measured_spread": (max(times) - min(times)) / measured,
                    "time_error": predicted / measured - 1,
                    "processor_error": processor / busy[number] - 1,
                    "predicted_bytes": expected_peak,
                    "measured_bytes": peak,
                    "memory_error": expected_peak / peak - 1,
                }
            )
        return rows

    def _predicted(self, plan: Plan, length: int, costs) -> tuple[float, float]:
        """Seconds of the model; peak bytes, static ones and the optimizer's step included."""
        outcome = self._outcome(plan, length, costs)
        edges = model_seconds(_costs_of(costs), self._stage, length, 1)
        peak_bytes = max(outcome.peak_bytes, self._static_bytes + self._optimizer_bytes)
        return outcome.seconds + edges, peak_bytes

    def _outcome(self, plan: Plan, length: int, costs, *, forward_only: bool = False) -> Outcome:
        costs_of = _costs_of(costs)
        names = tuple({name for c in plan.layers.values() for name in (c.attention, c.mlp)})
        memory = stage_memory(costs_of, self._stage)
        policy = OptimalPolicy(
            names,
            cost_source(costs_of),
            memory,
            allowed=lambda number, operation: (getattr(plan[number], operation),),
            operations=self._operations,
        )
        outcome = evaluate(policy.problem(tuple(plan.layers), 1, length, forward_only), plan)
        assert outcome is not None
        return outcome

    def _seconds(self, needed, plans, length, rounds):
        """Medians of the operations, of the step around them; all times of the iterations."""
        from megatron_paradyse.profiler.measure import seconds_of_runs
        from megatron_paradyse.profiler.operations import Operations

        times: dict = {key: [] for key in needed}
        busy: dict = {key: [] for key in [*needed, "step", *range(len(plans))]}
        steps: list[float] = []
        iterations: list[list[float]] = [[] for _ in plans]
        operations = Operations(self._model, length, 1)
        for _ in range(rounds):
            for key in needed:
                operation, count = operations.get(key[1], key[0]), self._runs[key]
                run = functools.partial(seconds_of_runs, operation, count)
                times[key].append(self._busy(busy[key], run, count + 1))
            empty = functools.partial(seconds_of, self._empty_step)
            steps.append(self._busy(busy["step"], empty))
            for number, plan in enumerate(plans):
                step = functools.partial(self._step, plan, length)
                timed = functools.partial(seconds_of, step)
                iterations[number].append(self._busy(busy[number], timed))
        medians = {
            key: (statistics.median(f for f, _ in pairs), statistics.median(b for _, b in pairs))
            for key, pairs in times.items()
        }
        spent = {key: statistics.median(values) for key, values in busy.items()}
        return medians, statistics.median(steps), iterations, spent

    def _busy(self, series: list[float], run, times: int = 1):
        """run(), which does a thing so many times; adds the processor seconds of one, of all ranks.

        A busy machine does not stretch them.
        """
        import torch

        start = time.process_time()
        result = run()
        spent = torch.tensor((time.process_time() - start) / times, dtype=torch.float64)
        torch.distributed.all_reduce(spent)
        series.append(float(spent))
        return result

    def _empty_step(self) -> None:
        from megatron_paradyse.profiler.model import step_without_microbatches

        step_without_microbatches(self._model)

    def _step(self, plan: Plan, length: int, *, forward_only: bool = False) -> None:
        """One iteration of training, or of an evaluation: one microbatch of s tokens."""
        from megatron_paradyse.profiler.iterations import train_one

        self._model.policy.chosen = plan
        (_evaluate_one if forward_only else train_one)(self._model, length)

    def _peak(self, plan: Plan, length: int, *, forward_only: bool = False) -> float:
        from megatron_paradyse.profiler.model import largest_over_ranks

        with self._meter:
            gc.collect()
            self._meter.reset_peak()
            self._step(plan, length, forward_only=forward_only)
            return largest_over_ranks([self._meter.peak_bytes - self._before_bytes])[0]


def _evaluate_one(model, seq_length: int) -> None:
    """The forward without gradient, as Megatron's evaluations run it."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training import get_args

    from megatron_paradyse.profiler.operations import raw_batch
    from megatron_paradyse.train.gpt import forward_step

    get_args().seq_length = seq_length
    for chunk in model.chunks:
        chunk.eval()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([raw_batch(seq_length, 1)]),
            model=model.chunks,
            num_microbatches=1,
            seq_length=seq_length,
            micro_batch_size=1,
            forward_only=True,
        )
    for chunk in model.chunks:
        chunk.train()


def _costs_of(costs):
    return lambda name, operation, s, b: costs[name, operation]


def _num_runs(once_seconds: float) -> int:
    """In a turn of an operation: several short ones, as in an iteration, follow each other."""
    return max(1, min(5, int(TURN_SECONDS / once_seconds)))


def _needed(plans: list[Plan], operations: OperationsOf) -> set[tuple[str, str]]:
    """Every operation of the plans; of a recomputed one also what it recomputes."""
    found = set()
    for plan in plans:
        for name, operation in plan.halves(operations):
            found |= {(name, operation), (name.removesuffix(RECOMPUTE), operation)}
    return found


if __name__ == "__main__":
    main()
