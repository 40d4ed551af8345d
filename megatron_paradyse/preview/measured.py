"""Limits found by running: trials, the file that keeps them, and the search between them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from megatron_paradyse.costs.strict import (
    ContentError,
    check_array,
    check_fields,
    check_keys,
    load_json,
)
from megatron_paradyse.errors import UserError
from megatron_paradyse.preview.longest import Longest
from megatron_paradyse.strategies.sizes import HOLDINGS
from megatron_paradyse.units import MAX_SEQ_LENGTH
from megatron_paradyse.whole_file import write_whole

MAX_FILE_BYTES = 16 << 20
MAX_TRIALS = 100_000
FITS = "fits"
REMEDY = "give another --measure, or remove the file"


@dataclass(frozen=True)
class About:
    """What trials are of: these must be alike for trials to be compared.

    costs: the fingerprint of the cost file. margin_ppm: of its predictions. allocator: of a GPU.
    holdings: see strategies/sizes.py; None: not told, as by files of earlier versions.
    """

    costs: str
    budget_bytes: int
    margin_ppm: int
    batch_size: int
    num_layers: int
    ranks: int
    stand_in: bool
    hardware: str
    torch: str
    allocator: str
    holdings: int | None = HOLDINGS


@dataclass(frozen=True)
class Trial:
    """One iteration of a strategy on all layers, or of ParaDySe's plan.

    status: "fits", "oom", or why it could not run. peak_bytes, of the rank that held most,
    reserved_bytes, of a GPU's allocator, and microseconds: 0 where it did not come to its end.
    """

    strategy: str
    tokens: int
    status: str
    plan: str
    date: str
    peak_bytes: int = 0
    reserved_bytes: int = 0
    microseconds: int = 0

    @property
    def fits(self) -> bool:
        return self.status == FITS


@dataclass(frozen=True)
class MeasuredLimit:
    """tokens: the longest that fitted, 0 where none did; above: the shortest tried that did not.

    above is None where nothing longer was tried, for `why`.
    """

    strategy: str
    predicted: int
    tokens: int
    above: int | None
    why: str = ""

    @property
    def error(self) -> float | None:
        """Of the prediction: predicted over measured, less 1."""
        return self.predicted / self.tokens - 1 if self.tokens else None


class TrialFile:
    """The trials of one About, written anew after each."""

    def __init__(self, path: str | None, about: About):
        """Goes on from those in the file, if there is one; UserError if they are of another.

        path None: on a rank that keeps none.
        """
        self._path, self.about = path, about
        self.trials: dict[tuple[str, int], Trial] = {}
        if path is None or not Path(path).exists():
            return
        there, trials = read_trials(path)
        if there.holdings != about.holdings:
            raise UserError(
                f"the trials in {path} are of strategies of another version of megatron_paradyse, "
                f"which may hold more or less than these: {REMEDY}"
            )
        for name, value in asdict(there).items():
            if value != getattr(about, name):
                raise UserError(
                    f"{path} holds trials of something else ({name}: {value}, here "
                    f"{getattr(about, name)}): {REMEDY}"
                )
        self.trials = {(trial.strategy, trial.tokens): trial for trial in trials}

    def add(self, trial: Trial) -> None:
        self.trials[trial.strategy, trial.tokens] = trial

    def save(self) -> None:
        """The whole file: a reader finds the old one or the new one, never a part."""
        assert self._path is not None
        trials = [asdict(trial) for trial in self.trials.values()]
        content = {"about": asdict(self.about), "trials": trials}
        write_whole(self._path, json.dumps(content, indent=1) + "\n")


def read_trials(path: str) -> tuple[About, list[Trial]]:
    """UserError for anything else than a file of trials."""
    content, _ = load_json(path, max_bytes=MAX_FILE_BYTES, remedy=REMEDY)
    try:
        values = check_keys(content, "the file", ("about", "trials"))
        told = check_fields(About, values["about"], "about", optional=("holdings",))
        about = About(**{"holdings": None, **told})
        listed = check_array(values["trials"], "trials", max_items=MAX_TRIALS)
        trials = [
            Trial(**check_fields(Trial, value, f"trials[{i}]")) for i, value in enumerate(listed)
        ]
    except ContentError as error:
        raise UserError(f"{path} is not a file of trials: {error}: {REMEDY}") from error
    return about, trials


class Trials(Protocol):
    """Those of one strategy."""

    def fits(self, tokens: int) -> bool | None:
        """Whether it fits; None where that would take too long."""

    def longest(self) -> int:
        """The longest sequence that would not take too long; 0 where there is none."""


def search(
    strategy: str,
    predicted: int,
    trials: Trials,
    *,
    step: int,
    resolution: float,
) -> MeasuredLimit:
    """The limit to `resolution`, by as few trials as the prediction is good.

    The first two lie half of it below and above the prediction; where the first would take too
    long, the longest that does not is tried instead. All are multiples of step.
    """

    def apart(tokens: float) -> int:
        return max(step, math.ceil(resolution * tokens / step) * step)

    low, high, width = 0, None, 1
    tokens = max(step, int((1 - resolution / 2) * predicted) // step * step)
    found = trials.fits(tokens)
    if found is None:
        tokens = min(tokens - step, trials.longest() // step * step)
        found = trials.fits(tokens) if tokens > 0 else None
    while high is None:
        if found is None:
            return MeasuredLimit(strategy, predicted, low, None, "longer ones would take too long")
        if not found:
            high = tokens
        elif tokens >= MAX_SEQ_LENGTH // step * step:
            return MeasuredLimit(strategy, predicted, tokens, None, "the longest there is")
        else:
            low = tokens
            tokens = min(tokens + width * apart(predicted or tokens), MAX_SEQ_LENGTH // step * step)
            width *= 2
            found = trials.fits(tokens)
    while not low and high > step:
        tokens = max(step, high - width * apart(high))
        width *= 2
        if trials.fits(tokens):
            low = tokens
        else:
            high = tokens
    while low and high - low > apart(high):
        middle = (low + high) // 2 // step * step
        if trials.fits(middle):
            low = middle
        else:
            high = middle
    return MeasuredLimit(strategy, predicted, low, high)


def measured_limits(
    found: Longest,
    trials_of: Callable[[str], Trials],
    *,
    resolution: float,
    only: Sequence[str] | None,
) -> list[MeasuredLimit]:
    """ParaDySe's first, then each strategy's, in the order of the predictions; or some of them."""
    return [
        search(
            limit.strategy,
            limit.tokens,
            trials_of(limit.strategy),
            step=found.alignment,
            resolution=resolution,
        )
        for limit in found.limits
        if only is None or limit.strategy in only
    ]


class _Made:
    """The trials of a strategy that were made before."""

    def __init__(self, trials: Iterable[Trial]):
        self._fits = {trial.tokens: trial.fits for trial in trials}

    def fits(self, tokens: int) -> bool | None:
        return self._fits.get(tokens)

    def longest(self) -> int:
        return max(self._fits, default=0)


def of_file(trials: Iterable[Trial]) -> Callable[[str], Trials]:
    """What measured_limits asks, answered by trials that were made."""
    made = list(trials)
    return lambda name: _Made(trial for trial in made if trial.strategy == name)
