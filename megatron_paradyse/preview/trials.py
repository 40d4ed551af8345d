"""One rank's part in finding limits by running: whole iterations of the whole model.

On a GPU the allocator is kept to the budget, and an iteration that wants more ends out of memory.
On a CPU the bytes are counted, as an enforced budget counts them, and compared with it.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_paradyse.costs.table import OK, OOM
from megatron_paradyse.plan import Plan
from megatron_paradyse.planner.problem import Outcome
from megatron_paradyse.preview.longest import PARADYSE, Longest
from megatron_paradyse.preview.measured import FITS, About, Trial, TrialFile, measured_limits
from megatron_paradyse.preview.setup import Setup
from megatron_paradyse.preview.trial_start import check_model, start_alone, start_rank
from megatron_paradyse.units import MAX_SEQ_LENGTH

NO_HOST_ROOM = "not run: the host has no room for what all layers would copy to it"
MOST_OF_PLAN = 400  # characters that a trial tells
OWN_ALLOCATOR = "PyTorch's defaults"
NO_ALLOCATOR = "none: bytes are counted"


@dataclass(frozen=True)
class Options:
    """output: the trials. most_seconds: trials predicted to take longer are not made.

    stand_in: this process alone, as each of the ranks that differ of setup.description.p. only: as
    measured_limits takes it.
    """

    output: str
    resolution: float
    most_seconds: float | None
    stand_in: bool
    only: Sequence[str] | None


def run_trials(
    options: Options,
    setup: Setup,
    found: Longest,
    flags: Sequence[str],
    report: Callable[[dict], None],
) -> None:
    """Search every limit in `found`; all ranks must call it. Once in a process."""
    from megatron_paradyse import megatron_start
    from megatron_paradyse.train import plugin

    megatron_start.before_cuda()
    plugin.install()
    with contextlib.ExitStack() as stack:
        agree = start_alone(setup, flags, stack) if options.stand_in else start_rank(flags)
        check_model(setup)
        rank = _Rank(options, setup, found, agree, report)
        rank.take_note()
        trials_of = partial(_OfOne, rank)
        measured_limits(found, trials_of, resolution=options.resolution, only=options.only)


class _OfOne:
    """The trials of one strategy."""

    def __init__(self, rank: _Rank, name: str):
        self._rank, self._name = rank, name

    def fits(self, tokens: int) -> bool | None:
        return self._rank.fits(self._name, tokens)

    def longest(self) -> int:
        return self._rank.longest(self._name)


class _Rank:
    """The model, and its trials."""

    def __init__(
        self,
        options: Options,
        setup: Setup,
        found: Longest,
        agree: Any,
        report: Callable[[dict], None],
    ):
        import torch

        from megatron_paradyse.live_bytes import make_meter
        from megatron_paradyse.profiler.model import build_model, step_without_microbatches

        self._options, self._setup, self._found = options, setup, found
        self._agree, self._report = agree, report
        self._budget = setup.stage.budget_bytes
        self._writes = options.stand_in or os.environ["RANK"] == "0"
        self._file = self._opened()
        if torch.cuda.is_available():
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._budget / total))
        report({"text": "building the model"})
        self._meter = make_meter()
        with self._meter:
            self._before = self._meter.live_bytes
            self._model = build_model(setup.policies.num_layers)
            step_without_microbatches(self._model)  # makes the optimizer's states
        gc.collect()
        gc.freeze()  # what is there now stays: no later collection need look at it

    def _about(self) -> About:
        import torch

        from megatron_paradyse.megatron_start import allocator_settings
        from megatron_paradyse.train.describe import hardware

        setup = self._setup
        on_gpu = torch.cuda.is_available()
        return About(
            costs=setup.policies.costs.file.fingerprint,
            budget_bytes=self._budget,
            margin_ppm=round(setup.stage.margin * 1e6),
            batch_size=self._found.batch_size,
            num_layers=setup.policies.num_layers,
            ranks=setup.description.p if self._options.stand_in else setup.description.ranks,
            stand_in=self._options.stand_in,
            hardware=hardware().name,
            torch=torch.__version__,
            allocator=(allocator_settings() or OWN_ALLOCATOR) if on_gpu else NO_ALLOCATOR,
        )

    def _opened(self) -> TrialFile:
        """With the first rank's trials on every rank, some of which may not see its disk."""
        path = self._options.output if self._writes else None
        file = TrialFile(path, self._about())
        known = self._agree.first([asdict(trial) for trial in file.trials.values()])
        for values in known:
            file.add(Trial(**values))
        return file

    def take_note(self) -> None:
        """Record the trial at which a rank alone ended the last start of all ranks."""
        from megatron_paradyse.profiler.agree import take_note

        note = take_note(Path(self._options.output)) if self._writes else None
        match self._agree.first(note):
            case [[str() as name, int() as tokens], str()] if tokens > 0:
                self.record(self.empty(name, tokens, OOM))

    def record(self, trial: Trial) -> None:
        self._file.add(trial)
        if self._writes:
            self._file.save()

    def _forget(self, name: str, tokens: int) -> None:
        """A trial of another plan: who tells the limits would take it for one of this."""
        if self._file.trials.pop((name, tokens), None) is not None and self._writes:
            self._file.save()

    def empty(self, name: str, tokens: int, status: str, plan: str = "") -> Trial:
        return Trial(name, tokens, status, plan[:MOST_OF_PLAN], datetime.date.today().isoformat())

    def fits(self, name: str, tokens: int) -> bool | None:
        """None where it would take too long."""
        trial = self._file.trials.get((name, tokens))
        outcome = self._planned(name, tokens)
        if trial is None or not _is_of(trial, outcome):
            if outcome is not None and self._takes_too_long(outcome):
                about = f"about {outcome.seconds:.0f} s, left out"
                self._report({"text": f"{name} at {tokens:,}: {about}"})
                self._forget(name, tokens)
                return None
            if outcome is None:
                trial = self.empty(name, tokens, NO_HOST_ROOM)
            else:
                trial = self._try(name, outcome.plan, tokens)
            self.record(trial)
            self._report({"text": f"{name} at {tokens:,} tokens: {trial.status}"})
        return trial.fits

    def longest(self, name: str) -> int:
        """The longest that would not take too long."""
        step = self._found.alignment
        low, high = 0, MAX_SEQ_LENGTH // step + 1
        while high - low > 1:
            middle = (low + high) // 2
            outcome = self._planned(name, middle * step)
            if outcome is None or self._takes_too_long(outcome):
                high = middle
            else:
                low = middle
        return low * step

    def _takes_too_long(self, outcome: Outcome) -> bool:
        most = self._options.most_seconds
        return most is not None and outcome.seconds > most

    def _planned(self, name: str, tokens: int) -> Outcome | None:
        """What training would run there; None where the host has no room for this strategy."""
        from megatron_paradyse.preview.forecast import alone

        setup = self._setup
        size = self._found.batch_size, tokens
        barred = setup.policy.barred(*size)
        problem = setup.policy.problem(setup.layers, *size, False, None, barred)
        if name == PARADYSE:
            return setup.policy.planner.plan(problem)
        return alone(problem, [name]).get(name)

    def _try(self, name: str, plan: Plan, tokens: int) -> Trial:
        from megatron_paradyse.profiler.agree import (
            RESTART_CODE,
            OneRankFailedError,
            leave_note,
            status_of,
        )
        from megatron_paradyse.profiler.iterations import begin_anew
        from megatron_paradyse.profiler.runner import end_if_one_is_missing
        from megatron_paradyse.train.ending import is_lost_peer

        peak = reserved = microseconds = 0
        status, failed = OK, False
        try:
            peak, reserved, microseconds = self._iteration(plan, tokens)
        except Exception as error:
            if is_lost_peer(error):
                end_if_one_is_missing(error)
            status, failed = status_of(error), True
            error.__traceback__ = None  # its frames hold tensors
        try:
            status = self._agree.status(status)
        except OneRankFailedError as error:
            leave_note(Path(self._options.output), (name, tokens), str(error))
            os._exit(RESTART_CODE)
        if failed:
            gc.collect()
            begin_anew(self._model)
        if status == OK:
            status = OOM if peak > self._budget else FITS
        return replace(
            self.empty(name, tokens, status, plan.runs()),
            peak_bytes=peak,
            reserved_bytes=reserved,
            microseconds=microseconds,
        )

    def _iteration(self, plan: Plan, tokens: int) -> tuple[int, ...]:
        """Of the ranks that this process stands for, the largest: peak, reserved, microseconds."""
        found = []
        for place in self._places(plan, tokens):
            with place:
                found.append(self._measured(plan, tokens))
        return tuple(map(max, zip(*found, strict=True)))

    def _places(self, plan: Plan, tokens: int) -> list[contextlib.AbstractContextManager]:
        if not self._options.stand_in:
            return [contextlib.nullcontext()]
        from megatron_paradyse.costs.description import CAUSAL
        from megatron_paradyse.simulator.run import ranks_that_differ
        from megatron_paradyse.simulator.simulated_rank import attention_as_rank
        from megatron_paradyse.strategies.sizes import is_narrow

        d = self._setup.description
        causal = d.attention_mask == CAUSAL
        ranks: set[int] = set()
        for name in {choice.attention for choice in plan.layers.values()}:
            for narrow in {False, *(is_narrow(w, tokens, d.p) for w in d.windows.values())}:
                more = ranks_that_differ(name, "attention", p=d.p, causal=causal, narrow=narrow)
                ranks |= {*more}
        return [attention_as_rank(self._model, rank) for rank in sorted(ranks)]

    def _measured(self, plan: Plan, tokens: int) -> tuple[int, ...]:
        """Of an iteration that follows others of this length, as in a training."""
        from megatron.core.parallel_state import get_global_memory_buffer

        from megatron_paradyse.model_edges import forget_lengths

        self._model.policy.chosen = plan
        with self._meter:
            forget_lengths(self._model.chunks)
            numbers = self._once(tokens)
            if get_global_memory_buffer().buffer:  # what gathers made it: now it is there before
                numbers = self._once(tokens)
        return numbers

    def _once(self, tokens: int) -> tuple[int, ...]:
        import torch

        from megatron_paradyse.profiler.iterations import train_one
        from megatron_paradyse.profiler.model import largest_over_ranks

        on_gpu = torch.cuda.is_available()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        self._meter.reset_peak()
        start = time.perf_counter()
        train_one(self._model, tokens, self._found.batch_size)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        peak = self._meter.peak_bytes - self._before
        reserved = torch.cuda.max_memory_reserved() if on_gpu else 0
        return tuple(map(int, largest_over_ranks([peak, reserved, 1e6 * seconds])))


def _is_of(trial: Trial, outcome: Outcome | None) -> bool:
    """Whether what was tried would run now: by other settings, or another version, another plan is.

    Of what ended a rank alone no plan is known.
    """
    if outcome is None or trial.status == NO_HOST_ROOM:
        return outcome is None and trial.status == NO_HOST_ROOM
    return trial.plan in ("", outcome.plan.runs()[:MOST_OF_PLAN])
