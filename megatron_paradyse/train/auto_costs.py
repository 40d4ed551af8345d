"""Costs for a run that names none: cached, else measured quickly at the start, else simulated.

All ranks take the costs that the first rank found. They speak through a store (meeting.py), before
Megatron sets up its process groups; the quick profile runs in child processes, so that whatever it
does to memory, random numbers or process groups ends with it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.errors import UserError, errors_said
from megatron_paradyse.planner.known import known_strategies, nothing_known
from megatron_paradyse.policy import cost_policy_kind
from megatron_paradyse.ports import free_port, without_torchrun
from megatron_paradyse.settings import PACKED, Settings
from megatron_paradyse.train.cost_cache import (
    cached_costs,
    device_name,
    measured_strategies,
    stem_of_own,
)
from megatron_paradyse.train.meeting import meet
from megatron_paradyse.train.megatron_version import find_megatron, is_wheel
from megatron_paradyse.units import printable
from megatron_paradyse.whole_file import write_whole

BUDGET_SECONDS = 40  # of measuring; starting processes and fitting take about 15 more
LIMIT_SECONDS = 300  # until a quick profile that hangs is given up
SIMULATION_SECONDS = 300
SECONDS_FOR_OTHERS = 5
REMEDY = "give --paradyse-cost-model FILE, or --paradyse-policy fixed:megatron_ts"


def with_costs(args: argparse.Namespace) -> Settings:
    """The settings of the run, with a cost file if the policy needs one and none is named.

    All ranks must call it, before process groups exist. UserError, alike on all of them, when
    there are no costs to be had.
    """
    settings = args.paradyse_settings
    if cost_policy_kind(settings) is None or settings.cost_model is not None:
        return settings
    search = Search(args, settings)
    path, simulated = search.run()
    accept = settings.accept_costs or simulated
    return dataclasses.replace(settings, cost_model=str(path), accept_costs=accept)


class Search:
    """Finds the costs of one run, together with the other ranks."""

    def __init__(self, args: argparse.Namespace, settings: Settings):
        self._args, self._settings = args, settings
        self._rank, self._world = int(os.environ.get("RANK", 0)), args.world_size
        self._file = cached_costs(args, settings)
        self._store = meet("costs")

    def run(self) -> tuple[Path, bool]:
        """The cost file on this machine, and whether it is simulated."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            return self._found()
        except OSError as error:
            said = error.strerror or error
            if error.filename is None or os.fspath(error.filename) == sys.executable:
                self._fail(f"no costs: a process of theirs cannot start ({said}): {REMEDY}")
            self._fail(f"{self._file.parent}: {said}: set MEGATRON_PARADYSE_CACHE")

    def _found(self) -> tuple[Path, bool]:
        if self._rank == 0:
            self._say_all("way", self._way())
        way = self._hear("way", LIMIT_SECONDS)
        if way == "profile":
            self._profile()
        elif way == "simulate" and self._rank == 0:
            self._simulate()
        if self._rank == 0:
            self._say_all("costs", self._file.read_text(encoding="utf-8"))
        content = self._hear("costs", LIMIT_SECONDS + SIMULATION_SECONDS)
        if not _holds(self._file, content):
            write_whole(self._file, content)
        self._leave_together()
        file = read_cost_file(self._file)
        self._announce(way, file)
        return self._file, file.table.description.source == "simulated"

    def _way(self) -> str:
        if self._is_kept():
            return "cached"
        if self._settings.profile and self._args.use_checkpoint_args:
            self._fail(
                "no costs: a quick profile reads no checkpoint: give the model's flags instead of "
                "--use-checkpoint-args, or --paradyse-cost-model FILE"
            )
        if self._settings.profile:
            self._say(
                "no --paradyse-cost-model: measuring this model on this machine, about a minute "
                "(--paradyse-no-profile: do without)"
            )
            return "profile"
        if self._gpu() is None:
            self._fail(
                "no costs: --paradyse-no-profile, none in the cache, and none can be simulated for "
                f"{device_name()}: leave --paradyse-no-profile out, give --paradyse-cost-model "
                "FILE (measured, or megatron-paradyse simulate --gpu with a YAML file of this "
                "device), or --paradyse-policy fixed:megatron_ts"
            )
        return "simulate"

    def _is_kept(self) -> bool:
        """Whether costs with which this run can plan are there; earlier versions kept others."""
        try:
            file = read_cost_file(self._file)
            of_run = file.table.description.p == self._args.tensor_model_parallel_size
            return of_run and bool(known_strategies(file.require_model()))
        except UserError:
            return False

    def _profile(self) -> None:
        """Every rank's child takes part; the first rank fits and keeps the result."""
        with contextlib.ExitStack() as until_fitted:
            if self._rank == 0:
                self._say_all("stem", until_fitted.enter_context(stem_of_own(self._file)))
                self._say_all("port", str(free_port()))
            self._profile_as(self._hear("stem", LIMIT_SECONDS))

    def _profile_as(self, stem: str) -> None:
        raw = self._file.with_name(f"{stem}.raw.json")
        port = self._hear("port", LIMIT_SECONDS)
        command = [sys.executable, "-m", "megatron_paradyse", "profile", "--output", str(raw)]
        command += ["--quick", "--budget-seconds", str(BUDGET_SECONDS)]
        command += ["--batch-sizes", str(self._args.micro_batch_size)]
        command += ["--packed"] if self._settings.sequences == PACKED else []
        strategies = measured_strategies(self._settings)
        command += ["--strategies", ",".join(strategies)] if strategies else []
        command += self._flags()
        threads = str(torch.get_num_threads())
        environment = {**_environment(), "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
        log = self._file.with_name(f"{stem}.{self._rank}.log")
        with log.open("w") as said:
            child = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        reason = self._wait(child, log)
        if reason is not None:
            self._fail(f"the quick profile failed: {reason} (log: {log}): {REMEDY}")
        if self._rank == 0:
            kept = stem == self._file.stem  # what was measured, for the next start
            self._fit(raw, "start again to go on measuring, or " if kept else "")
        log.unlink(missing_ok=True)

    def _wait(self, child: subprocess.Popen, log: Path) -> str | None:
        """None when it ended well, else why not; it has ended either way."""
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            while child.poll() is None:
                if self._store.check(["failed"]):
                    self._raise_failed()
                if time.monotonic() > deadline:
                    return f"it took more than {LIMIT_SECONDS} s"
                time.sleep(0.1)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        if child.returncode == 0:
            return None
        lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()]
        errors = errors_said(lines)
        deadline = time.monotonic() + SECONDS_FOR_OTHERS
        while not errors and time.monotonic() < deadline:  # another rank's child may say why
            if self._store.check(["failed"]):
                self._raise_failed()
            time.sleep(0.1)
        return (errors or lines[-1:] or ["it said nothing"])[0][:300]

    def _simulate(self) -> None:
        self._say("no --paradyse-cost-model: simulating this model's costs")
        with stem_of_own(self._file) as stem:
            self._simulate_into(self._file.with_name(f"{stem}.raw.json"))

    def _simulate_into(self, raw: Path) -> None:
        p, dtype = self._args.tensor_model_parallel_size, self._args.params_dtype
        command = [sys.executable, "-m", "megatron_paradyse", "simulate", "--gpu", str(self._gpu())]
        command += ["--ranks", str(p), "-o", str(raw), "--max-length", str(self._args.seq_length)]
        command += ["--batch-sizes", str(self._args.micro_batch_size)]
        command += ["--dtype", str(dtype).removeprefix("torch."), *self._flags()]
        self._run(command, SIMULATION_SECONDS, "the simulation failed")
        self._fit(raw)

    def _flags(self) -> list[str]:
        """The model's: those of the run, its settings file among them, and what its script says.

        A profile that is told no p takes all ranks, of which this run may make replicas.
        """
        p = str(self._args.tensor_model_parallel_size)
        of_run = ["--tensor-model-parallel-size", p, "--paradyse-model", self._args.paradyse_model]
        return ["--", *sys.argv[1:], *of_run]

    def _fit(self, raw: Path, remedy: str = "") -> None:
        """Keep the fit, unless another job has kept its own: its ranks may be about to read it."""
        fitted = raw.with_suffix(".fitted.json")
        command = [sys.executable, "-m", "megatron_paradyse", "fit", str(raw), "-o", str(fitted)]
        self._run(command, LIMIT_SECONDS, "the quick costs cannot be fitted", remedy)
        raw.unlink(missing_ok=True)
        if self._is_kept():
            fitted.unlink()
            return
        fitted.replace(self._file)
        self._check()

    def _check(self) -> None:
        """Costs with which nothing can be planned are not kept: the next start would find them."""
        file = read_cost_file(self._file)
        if known_strategies(file.require_model()):
            return
        self._file.unlink()
        self._fail(f"{nothing_known(file.table)}: {REMEDY}")

    def _run(self, command: list[str], limit_seconds: float, failed: str, remedy: str = "") -> None:
        remedy += REMEDY
        try:
            result = subprocess.run(
                command,
                env=_environment(),
                timeout=limit_seconds,
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            self._fail(f"{failed}: it took more than {limit_seconds} s: {remedy}")
        if result.returncode:
            lines = result.stderr.strip().splitlines() or ["it said nothing"]
            self._fail(f"{failed}: {lines[-1].removeprefix('error: ')[:300]}: {remedy}")

    def _gpu(self) -> str | None:
        """The simulator's name of this device, if it knows it."""
        if not torch.cuda.is_available():
            return None
        from megatron_paradyse.simulator.hardware import known_name

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return known_name(properties.name, properties.total_memory)

    def _announce(self, way: str, file) -> None:
        table = file.table
        timed = {m.seq_length for m in table.measurements if m.is_ok and m.strategy != "model"}
        origin = {
            "cached": f"kept from {table.description.date}",
            "profile": f"a quick profile of {len(timed)} lengths up to {max(timed, default=0):,}",
            "simulate": "simulated, not measured",
        }[way]
        self._say(
            f"costs: {origin}, in {self._file}; better ones: megatron-paradyse profile and fit, "
            "then --paradyse-cost-model FILE"
        )

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(f"> paradyse: {text}", flush=True)

    def _say_all(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def _hear(self, key: str, limit_seconds: float) -> str:
        """The value once it is there; UserError if a rank has failed."""
        deadline = time.monotonic() + limit_seconds
        while not self._store.check([key]):
            if self._store.check(["failed"]):
                self._raise_failed()
            if time.monotonic() > deadline:
                self._fail(
                    f"no word of the first rank for {limit_seconds:g} s: give "
                    "--paradyse-cost-model FILE"
                )
            time.sleep(0.05)
        return self._store.get(key).decode()

    def _fail(self, reason: str) -> NoReturn:
        """End the search on every rank."""
        if not self._store.check(["failed"]):
            self._store.set("failed", printable(reason))
        self._raise_failed()

    def _raise_failed(self) -> NoReturn:
        raise UserError(self._store.get("failed").decode())

    def _leave_together(self) -> None:
        """The store may live in the first rank's process: it waits until all have read."""
        self._store.add("read", 1)
        deadline = time.monotonic() + 30
        while self._store.add("read", 0) < self._world and time.monotonic() < deadline:
            time.sleep(0.05)


def _environment() -> dict[str, str]:
    """Of a process that finds costs: it imports the Megatron of this run, also of a checkout."""
    environment = without_torchrun()
    found = find_megatron()
    if found is not None and not is_wheel(found[1]):
        path = [str(found[1]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return environment


def _holds(path: Path, content: str) -> bool:
    """Whether a file is that text: of the first rank, on a disk that all of them see."""
    try:
        return path.read_bytes() == content.encode()
    except OSError:
        return False
