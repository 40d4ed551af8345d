"""A small training that faults interrupt again and again, and that goes on from its checkpoints."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.train.harness import run_each, with_defaults, write_documents
from tests.train.synthetic_costs import write_costs

RANKS = 2
WATCHDOG_SECONDS = 6
LIMIT_SECONDS = 100  # of a run; the watchdog's limit, the start and a save are within it
SAVE_INTERVAL = 4
LAST = 60  # iterations of the undisturbed run
PLAN = """\
layers:
  1: {attention: ulysses_z, mlp: metp+recompute}
  2: {attention: megatron_cz+recompute, mlp: megatron_ts}
"""
FLAGS = [
    *("--tensor-model-parallel-size", RANKS, "--sequence-parallel", "--split", "100,0,0"),
    *("--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--paradyse"),
    *("--micro-batch-size", 1, "--global-batch-size", 2, "--lr", "1e-3"),
    *("--lr-decay-style", "constant", "--attention-dropout", 0.1, "--hidden-dropout", 0.1),
    *("--paradyse-watchdog-seconds", WATCHDOG_SECONDS, "--distributed-timeout-minutes", 1),
]
EQUAL = 1e-6  # relative difference of losses; runs are deterministic, so that it is 0 in fact


@dataclass
class Outcome:
    """codes: by rank, None for one that had to be ended. losses: by iteration."""

    codes: list[int | None]
    seconds: float
    stdout: str
    stderr: str
    start: int
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def errors(self) -> list[str]:
        """What ranks that fail alike say each for itself, where no torchrun ends them, is one."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("error")]
        return list(dict.fromkeys(re.sub(r"^error \(rank \d+\)", "error", line) for line in lines))

    @property
    def news(self) -> list[str]:
        lines = (self.stdout + "\n" + self.stderr).splitlines()
        return [line for line in lines if line.startswith("> paradyse: ")]


class Job:
    """One folder of data, costs, checkpoints and a trace; policy: as --paradyse-policy."""

    def __init__(self, folder: Path, *, by_cost: bool = False):
        self.folder, self.by_cost = folder, by_cost
        folder.mkdir(parents=True)
        lengths = np.random.default_rng(3).integers(2, 60, size=300).tolist()
        write_documents(folder / "corpus", lengths)
        self.costs = write_costs(folder / "costs.json")
        (folder / "plan.yaml").write_text(PLAN)
        self.checkpoints, self.trace = folder / "checkpoints", folder / "trace.jsonl"
        self.reference: dict[int, float] = {}

    def flags(self, *, until: int) -> list[str]:
        policy = ["--paradyse-policy", f"plan:{self.folder / 'plan.yaml'}"]
        if self.by_cost:
            policy = ["--paradyse-policy", "optimal", "--paradyse-cost-model", str(self.costs)]
            policy += ["--paradyse-accept-costs", "--paradyse-no-correction"]
        flags = [*FLAGS, *policy, "--data-path", self.folder / "corpus"]
        flags += ["--train-iters", 10_000, "--exit-interval", until]
        flags += ["--save", self.checkpoints, "--load", self.checkpoints]
        flags += ["--save-interval", SAVE_INTERVAL, "--paradyse-trace", self.trace]
        return with_defaults(flags)

    def iteration(self) -> int:
        """The one that the next run starts after, by Megatron's tracker."""
        try:
            return int((self.checkpoints / "latest_checkpointed_iteration.txt").read_text())
        except (OSError, ValueError):
            return 0

    def learn_reference(self, iterations: int) -> None:
        """What no fault disturbs: the losses that every later run must have."""
        outcome = self.run({"fault": "none"}, until=iterations, saves=False, limit=600)
        assert outcome.codes == [0] * RANKS, outcome.stderr[-3000:]
        self.reference = outcome.losses
        assert len(self.reference) == iterations

    def anew(self) -> None:
        """Forget the checkpoints and the trace."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        self.trace.unlink(missing_ok=True)

    def run(
        self,
        spec: dict,
        *flags: object,
        until: int,
        saves: bool = True,
        limit: float = LIMIT_SECONDS,
    ) -> Outcome:
        """Train to an iteration, with a fault; without saves from a checkpoint, but to none."""
        losses, path = self.folder / "losses", self.folder / "spec.json"
        losses.unlink(missing_ok=True)
        path.write_text(json.dumps({"rank": -1, **spec, "losses": str(losses)}))
        argv = self.flags(until=until)
        if not saves:
            for flag in ("--save", "--save-interval"):
                cut = argv.index(flag)
                argv = argv[:cut] + argv[cut + 2 :]
        start, began = self.iteration(), time.monotonic()
        codes, stdout, stderr = run_each(
            "benchmarks.reliability_rank",
            [str(path), *argv, *map(str, flags)],
            ranks=RANKS,
            folder=self.folder / "logs",
            timeout_seconds=limit,
        )
        outcome = Outcome(codes, time.monotonic() - began, stdout, stderr, start)
        if losses.exists():
            pairs = (line.split() for line in losses.read_text().splitlines())
            outcome.losses = {int(pair[0]): float(pair[1]) for pair in pairs if len(pair) == 2}
        return outcome

    def diverges(self, outcome: Outcome) -> float:
        """The largest relative difference of a loss from the undisturbed run's."""
        return max((abs(v / self.reference[n] - 1) for n, v in outcome.losses.items()), default=0.0)

    def trace_problem(self) -> str | None:
        """None where every line is JSON, but for a last one that a kill cut off."""
        if not self.trace.exists():
            return None
        for number, line in enumerate(self.trace.read_bytes().split(b"\n")[:-1], 1):
            try:
                json.loads(line)
            except ValueError:
                return f"line {number} of the trace is broken: {line[:80]!r}"
        return None


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
