"""What a report says: numbers from the traces, before any figure or text."""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_paradyse.costs.cost_file import CostFile
from megatron_paradyse.report.records import Run
from megatron_paradyse.report.trace_file import Trace
from megatron_paradyse.train.summary import Alone, FixedEstimate, RunningMedian

THIS_RUN = ("measured", "predicted")  # names of its curves


@dataclass(frozen=True)
class Curve:
    """Cumulative seconds at ascending lengths; oom_length: where a microbatch does not fit."""

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    oom_length: int | None = None


@dataclass(frozen=True)
class Content:
    """The traces of one training, one per grid, and the costs it may have used."""

    traces: Sequence[Trace]
    costs: CostFile | None

    @property
    def run(self) -> Run | None:
        """The last start, as the first trace that tells."""
        return next((trace.runs[-1] for trace in self.traces if trace.runs), None)

    @cached_property
    def main(self) -> Trace:
        """Iterations are the whole job's: alike in every trace, so those of the fullest count."""
        return max(self.traces, key=lambda trace: trace.iterations.count)

    @property
    def strategies(self) -> list[str]:
        """Those that ran, by their share of the layers."""
        return list(self.layer_shares)

    @cached_property
    def layer_shares(self) -> dict[str, float]:
        total = max(sum(t.summary.layers for t in self.traces), 1)
        return self._joined(lambda s: s.layer_shares, lambda s: s.layers / total)

    @cached_property
    def time_shares(self) -> dict[str, float]:
        total = max(sum(t.summary.seconds for t in self.traces), 1e-9)
        return self._joined(lambda s: s.time_shares, lambda s: s.seconds / total)

    def _joined(self, shares_of, weight_of) -> dict[str, float]:
        joined: dict[str, float] = {}
        for trace in self.traces:
            weight = weight_of(trace.summary)
            for name, share in shares_of(trace.summary).items():
                joined[name] = joined.get(name, 0.0) + weight * share
        return dict(sorted(joined.items(), key=lambda item: -item[1]))

    @property
    def time_error(self) -> float | None:
        """The median over the microbatches of all traces."""
        return _median(trace.summary.errors for trace in self.traces)

    @property
    def peak_error(self) -> float | None:
        return _median(trace.peak_errors for trace in self.traces)

    @property
    def predicted_seconds(self) -> float:
        return sum(trace.summary.predicted_seconds for trace in self.traces)

    @cached_property
    def lengths(self) -> Counter[int]:
        """Single sequences as Trace.lengths has them: of one pipeline stage of each replica."""
        first: dict[object, int] = {}
        for replica, stage in (trace.place for trace in self.traces if trace.lengths):
            first[replica] = min(first.get(replica, stage), stage)
        counted: Counter[int] = Counter()
        for trace in self.traces:
            if trace.place in first.items():
                counted.update(trace.lengths)
        return counted

    @property
    def num_packed(self) -> int:
        """Microbatches that are packed rows, which no estimate covers."""
        return sum(trace.summary.unpriced for trace in self.traces)

    @cached_property
    def fixed(self) -> list[FixedEstimate]:
        """Every strategy alone, summed over the grids; estimates of the cost model."""
        predicted = [t.summary for t in self.traces if t.summary.predicted_seconds]
        found = [{one.name: one for one in s.fixed_estimates()} for s in predicted]
        return [
            FixedEstimate(
                name, sum(f[name].seconds for f in found), sum(f[name].num_unfit for f in found)
            )
            for name in (found[0] if found else ())
            if all(name in f for f in found)
        ]

    @property
    def best_fixed(self) -> FixedEstimate | None:
        """The fastest single strategy that fits every microbatch."""
        fitting = [one for one in self.fixed if not one.num_unfit and one.seconds]
        return min(fitting, key=lambda one: one.seconds, default=None)

    @cached_property
    def cumulative(self) -> dict[str, Curve]:
        """Seconds of the layers, microbatches from short to long: "measured", "predicted", and
        each strategy alone by the cost model.
        """
        totals: dict[int, defaultdict[str, Alone]] = {}
        unfit: dict[str, int] = {}
        for trace in self.traces:
            for shape, sums in trace.summary.shapes:
                at = totals.setdefault(shape[1], defaultdict(Alone))
                at["measured"].join(Alone(sums.count, sums.seconds))
                at["predicted"].join(Alone(sums.num_predicted, sums.predicted_seconds))
                for name, alone in sums.alone.items():
                    at[name].join(alone)
                    if alone.num_unfit:
                        unfit[name] = min(unfit.get(name, shape[1]), shape[1])
        lengths = sorted(totals)
        names = dict.fromkeys(name for length in lengths for name in totals[length])
        return {name: _curve(name, lengths, totals, unfit.get(name)) for name in names}

    def warnings(self) -> list[str]:
        """What of the traces and the costs does not go together."""
        found = [fault for trace in self.traces for fault in _joined_files(trace)]
        first: dict[tuple[int, int], str] = {}
        for trace in self.traces:
            place = trace.runs[-1].place if trace.runs else None
            if place is not None and first.setdefault(place, trace.path) != trace.path:
                found.append(
                    f"{trace.path} is of the same replica and pipeline stage as {first[place]}: "
                    "another training or start, and iterations are those of one of them"
                )
        if self.costs is None:
            return found
        planned_by = {run.fingerprint for trace in self.traces for run in trace.runs} - {""}
        if planned_by - {self.costs.fingerprint}:
            who = "some starts of this run" if self.costs.fingerprint in planned_by else "this run"
            found.append(
                f"{self.costs.path} is not the cost file that {who} planned by: estimates and "
                "the run's predictions do not compare"
            )
        return found

    @property
    def num_out_of_memory(self) -> int:
        return sum(trace.num_out_of_memory for trace in self.traces)

    def source(self) -> str:
        """Whose numbers: for the footer of every figure."""
        run = self.run
        parts = []
        if run is not None:
            ranks = f"{run.ranks['world']} ranks on {run.hardware.name}"
            parts.append(f"trained on {ranks}, {run.dtype}, {run.date[:10]}")
            if run.costs:
                parts.append(f"predictions by costs {run.costs}")
        else:
            parts.append("machine and date of the training are not in the trace")
        if self.costs is not None and not (run and run.fingerprint == self.costs.fingerprint):
            d = self.costs.table.description
            parts.append(f"cost file {d.source} on {d.hardware.name}, p={d.p}, {d.date}")
        return "; ".join([*parts, f"drawn {datetime.date.today().isoformat()}"])

    def as_json(self) -> dict[str, Any]:
        """The numbers of the top of the page, for machines."""
        best, iterations = self.best_fixed, self.main.iterations.count
        return {
            "iterations": iterations,
            "iterations_again": self.main.num_again,
            "microbatches": sum(trace.summary.microbatches for trace in self.traces),
            "seconds": self.main.seconds,
            "tokens": self.main.tokens or None,
            "tokens_per_second": self.main.tokens / self.main.seconds_of_tokens
            if self.main.seconds_of_tokens
            else None,
            "longest_sequence_tokens": max(
                trace.longest_document or trace.longest for trace in self.traces
            )
            or None,
            "changes_of_plan": sum(trace.summary.switches for trace in self.traces),
            "layer_shares": self.layer_shares,
            "time_shares": self.time_shares,
            "median_error_seconds": self.time_error,
            "median_error_peak_bytes": self.peak_error,
            "out_of_memory": self.num_out_of_memory,
            "costs_corrected_by": None
            if self.main.corrected is None
            else self.main.corrected.seconds_factors,
            "starts": max(len(trace.runs) for trace in self.traces),
            "memory_budget_bytes": self.run.memory_budget_bytes if self.run else None,
            "packed_rows": self.num_packed,
            "estimates": None
            if self.costs is None or (self.num_packed and not self.predicted_seconds)
            else {
                "predicted_seconds": self.predicted_seconds,
                "best_fixed": best and best.name,
                "best_fixed_seconds": best and best.seconds,
                "fixed": {
                    one.name: {"seconds": one.seconds, "would_not_fit": one.num_unfit}
                    for one in self.fixed
                },
            },
        }


def _joined_files(trace: Trace) -> Iterator[str]:
    """What says that records of several traces are in one file: its sums are of all."""
    places = {run.place for run in trace.runs if run.place is not None}
    starts = Counter((run.date, run.place) for run in trace.runs)
    models = {(run.model["num_layers"], run.model["hidden_size"]) for run in trace.runs}
    if len(places) > 1:
        yield (
            f"{trace.path} holds records of {len(places)} replicas or pipeline stages, each of "
            "which counts all iterations: give the trace of each by itself"
        )
    if max(starts.values(), default=1) > 1:
        yield f"{trace.path} holds a start twice, and counts it twice: give each trace once"
    if len(models) > 1:
        told = ", ".join(f"{layers} layers of {hidden}" for layers, hidden in sorted(models))
        yield (
            f"{trace.path} holds trainings of several models ({told}), and sums over all of them: "
            "give each training a trace of its own"
        )


def _curve(name, lengths, totals, oom_length: int | None) -> Curve:
    found, seconds, total = [], [], 0.0
    for length in lengths:
        if oom_length is not None and length >= oom_length:
            break
        if totals[length][name].count < totals[length]["measured"].count:
            break  # not of all microbatches is it known
        total += totals[length][name].seconds
        found.append(length)
        seconds.append(total)
    return Curve(tuple(found), tuple(seconds), oom_length)


def _median(of_traces: Iterable[RunningMedian]) -> float | None:
    joined = RunningMedian()
    for errors in of_traces:
        joined.join(errors)
    return joined.value
