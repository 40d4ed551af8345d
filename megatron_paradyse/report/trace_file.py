"""Reads a trace line by line, in bounded memory: sums of everything, a bounded sample of rows."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_paradyse.costs.cost_file import CostFile
from megatron_paradyse.costs.strict import ContentError
from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import Plan
from megatron_paradyse.planner.from_costs import Stage
from megatron_paradyse.planner.policies import CostPolicy
from megatron_paradyse.report.estimates import NO_LOAD, cost_policies, policy_of, prices_rows_of
from megatron_paradyse.report.records import (
    Corrected,
    Iteration,
    Microbatch,
    OutOfMemory,
    Record,
    Run,
    UnknownKindError,
    parse_record,
    plan_of,
)
from megatron_paradyse.train.summary import MOST_SHAPES, RunningMedian, Summary

LONGEST_LINE = 1 << 16  # characters
MOST_ROWS = 8192  # kept of microbatches and of iterations
MOST_PLANS = 1024  # that differ
MOST_STRATEGIES = 200
MOST_RUNS = MOST_OUT_OF_MEMORY = 1000
MOST_WARNINGS = 20  # that differ
BINS_PER_OCTAVE = 4  # of the histogram of lengths


class Sample[Row]:
    """Every n-th row, where n doubles whenever too many are kept."""

    def __init__(self, most: int = MOST_ROWS):
        self.rows: list[Row] = []
        self.count, self.step = 0, 1
        self._most = most

    def add(self, row: Row) -> None:
        if self.count % self.step == 0:
            self.rows.append(row)
            if len(self.rows) > self._most:
                self.rows = self.rows[::2]
                self.step *= 2
        self.count += 1


@dataclass
class Trace:
    """What one file says: of one grid of ranks. costs: fitted, for estimates."""

    path: str
    costs: CostFile | None = None
    summary: Summary = field(default_factory=Summary)
    runs: list[Run] = field(default_factory=list)
    microbatches: Sample[Microbatch] = field(default_factory=Sample)
    iterations: Sample[Iteration] = field(default_factory=Sample)
    out_of_memory: list[OutOfMemory] = field(default_factory=list)
    num_out_of_memory: int = 0
    num_again: int = 0  # iterations that an earlier start had finished
    seconds: float = 0.0
    tokens: int = 0
    seconds_of_tokens: float = 0.0  # of the iterations that tell their tokens
    longest: int = 0  # single sequence, in tokens, padding included; 0: none
    longest_document: int = 0  # without padding; 0: not told
    lengths: Counter[int] = field(default_factory=Counter)  # single sequences by 4 log2(tokens)
    has_rows: bool = False  # packed ones, of whose documents it has no lengths
    peak_errors: RunningMedian = field(default_factory=RunningMedian)
    # Of each start: its first and last iteration, 0 where it had none, and bytes.
    budgets: list[tuple[int, int, int | None]] = field(default_factory=list)
    warnings: dict[str, tuple[int, int]] = field(default_factory=dict)  # -> first line, count
    corrected: Corrected | None = None  # the last
    _plans: dict[str, str] = field(default_factory=dict)
    _strategies: set[str] = field(default_factory=set)
    _policies: list[tuple[Stage, CostPolicy]] = field(default_factory=list)
    _furthest: int = 0  # iteration that was finished, and that before the last start
    _before: int = 0
    _num_layers: int = 0
    _first_chunk: tuple[int, ...] | None = None

    @property
    def place(self) -> tuple[object, int]:
        """Replica and pipeline stage: as the first start says, or else as training names files.

        Otherwise the file is taken to be the only one of its replica.
        """
        if self.runs and self.runs[0].place is not None:
            return self.runs[0].place
        named = re.search(r"-dp(\d+)-pp(\d+)\.[^.]*$", os.path.basename(self.path))
        return (int(named[1]), int(named[2])) if named else (self.path, 0)

    def add(self, record: Record) -> None:
        """Count a record; ContentError where that would take too much memory."""
        if isinstance(record, Microbatch):
            self._add_microbatch(record)
            self._reach(record.iteration)
            return
        self._first_chunk = None
        if isinstance(record, Iteration):
            self._reach(record.iteration)
            self.iterations.add(record)
            self.num_again += record.iteration <= self._before
            self._furthest = max(self._furthest, record.iteration)
            self.seconds += record.seconds
            self.tokens += record.tokens or 0
            self.seconds_of_tokens += record.seconds if record.tokens else 0.0
            self.longest_document = max(self.longest_document, record.longest or 0)
        elif isinstance(record, OutOfMemory):
            self._reach(record.microbatch.iteration)
            self.num_out_of_memory += 1
            if len(self.out_of_memory) < MOST_OUT_OF_MEMORY:
                self.out_of_memory.append(record)
        elif isinstance(record, Corrected):
            self.corrected = record
            self._renew()
        elif len(self.runs) < MOST_RUNS:
            self.runs.append(record)
            self.corrected = None
            self._renew()
            self._before = self._furthest
            self.budgets.append((0, 0, record.memory_budget_bytes))
        else:
            raise ContentError(f"more than {MOST_RUNS} starts")

    def _reach(self, iteration: int) -> None:
        """Count an iteration to the start before it, if the trace tells of one."""
        if self.budgets:
            first, last, budget = self.budgets[-1]
            self.budgets[-1] = (first or iteration, max(last, iteration), budget)

    def _add_microbatch(self, row: Microbatch) -> None:
        plan = self._plans.get(row.plan)
        if plan is None:
            plan = self._admit(row.plan)
        self.microbatches.add(dataclasses.replace(row, plan=plan))
        parsed = plan_of(row.plan)
        if row.is_packed:
            self.has_rows = True
        else:
            self._add_lengths(row, tuple(parsed.layers))
        priced = bool(self.costs and row.load and prices_rows_of(self.costs, row.load))
        policy, barred = self._policy(parsed), frozenset[str]()
        if policy is not None and not row.is_packed:
            barred = policy.barred(row.batch_size, row.seq_length)
        self.summary.count(
            row.batch_size,
            row.seq_length,
            parsed,
            switched=row.switched,
            planner_seconds=row.planner_seconds,
            predicted_seconds=row.predicted_seconds,
            seconds=row.seconds,
            load=row.load if priced else None,
            priced=priced or not row.is_packed,
            policy=policy,
            barred=barred,
        )
        if row.predicted_peak_bytes and row.peak_bytes:
            self.peak_errors.add(abs(row.predicted_peak_bytes / row.peak_bytes - 1))

    def _add_lengths(self, row: Microbatch, layers: tuple[int, ...]) -> None:
        """Where layers are interleaved, once for all chunks: an iteration begins with the first."""
        self.longest = max(self.longest, row.seq_length)
        if self._first_chunk is None:
            self._first_chunk = layers
        if layers == self._first_chunk:
            self.lengths[int(BINS_PER_OCTAVE * math.log2(row.seq_length))] += row.batch_size

    def _admit(self, plan: str) -> str:
        """A plan not seen before: one text for all its rows, "" where too many differ."""
        choices = plan_of(plan).layers.values()
        names = self._strategies | {n for c in choices for n in (c.attention, c.mlp)}
        if len(names) > MOST_STRATEGIES:
            raise ContentError(f"more than {MOST_STRATEGIES} strategies")
        self._strategies = names
        if len(self._plans) >= MOST_PLANS:
            return ""
        return self._plans.setdefault(plan, plan)

    def _policy(self, plan: Plan) -> CostPolicy | None:
        """By which what ran this plan is estimated: with the costs that were in force.

        Of the last start that chose by cost, or else of the last.
        """
        if self.costs is None:
            return None
        if not self._policies:
            by_cost = [run for run in self.runs if run.stages]
            run: Run | None = next(reversed(by_cost or self.runs), None)
            self._policies = cost_policies(self.costs, run, self.corrected)
            shape = self.costs.table.description.model
            self._num_layers = shape.num_layers if run is None else run.model["num_layers"]
        return policy_of(self._policies, tuple(plan.layers), self._num_layers)

    def _renew(self) -> None:
        """Other costs are in force."""
        self._policies = []
        self.summary.renew()

    def warn(self, what: str, line: int) -> None:
        if what not in self.warnings and len(self.warnings) >= MOST_WARNINGS:
            what = "other faults"
        first, count = self.warnings.get(what, (line, 0))
        self.warnings[what] = (first, count + 1)


def read_trace(path: str, costs: CostFile | None = None) -> Trace:
    """Read a trace; costs: fitted, for the estimates of fixed strategies.

    Raises UserError where there is no such file or nothing in it is of a trace; what is wrong with
    single lines is in the trace's warnings.
    """
    if not os.path.isfile(path):
        what = "is not a regular file" if os.path.lexists(path) else "does not exist"
        raise UserError(f"{path or repr(path)} {what}: give the file that --paradyse-trace wrote")
    trace = Trace(path, costs)
    with open(path, encoding="utf-8-sig", errors="replace") as stream:
        for number, line in _lines(stream):
            if line is None:
                trace.warn(f"longer than {LONGEST_LINE} characters", number)
                continue
            if not line.strip():
                continue
            try:
                trace.add(parse_record(line))
            except UnknownKindError as error:
                trace.warn(str(error), number)
            except ContentError as error:
                unfinished = not line.endswith("\n")
                trace.warn(
                    "unfinished (still being written?)" if unfinished else str(error), number
                )
    if not (trace.summary.microbatches or trace.iterations.count or trace.num_out_of_memory):
        told = "its starts finished none" if trace.runs else "it is empty"
        reason = next(iter(trace.warnings), told)
        raise UserError(
            f"{path} holds no microbatch and no iteration ({reason}): give the file that "
            "--paradyse-trace wrote"
        )
    return trace


def warning_lines(trace: Trace) -> list[str]:
    """One line for each kind of line that was left out."""
    name = os.path.basename(trace.path)
    lines = [
        f"{name}: line {first} left out: {what}"
        if count == 1
        else f"{name}: {count} lines left out, the first is line {first}: {what}"
        for what, (first, count) in trace.warnings.items()
    ]
    if trace.microbatches.step > 1:
        lines.append(
            f"{name}: figures show one in {trace.microbatches.step} of "
            f"{trace.microbatches.count:,} microbatches; sums are of all"
        )
    if trace.summary.shapeless:
        lines.append(
            f"{name}: estimates are of the first {MOST_SHAPES:,} shapes: "
            f"{trace.summary.shapeless:,} microbatches of others are left out"
        )
    if trace.summary.unpriced:
        lines.append(
            f"{name}: {trace.summary.unpriced:,} packed rows are not in the estimates: {NO_LOAD}"
        )
    return lines


def _lines(stream) -> Iterator[tuple[int, str | None]]:
    """Lines by number, from 1; None for one that is too long to be a record."""
    number = 0
    while part := stream.readline(LONGEST_LINE):
        number += 1
        if len(part) < LONGEST_LINE or part.endswith("\n"):
            yield number, part
            continue
        while rest := stream.readline(LONGEST_LINE):
            if rest.endswith("\n"):
                break
        yield number, None
