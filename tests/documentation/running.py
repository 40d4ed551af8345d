"""Runs the commands of one document in a workplace, in their order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import click
from click.testing import CliRunner

from megatron_paradyse.cli import COMMANDS, cli
from tests.documentation.markdown import ROOT, Command
from tests.documentation.rules import has_known_output, reason_not_to_run, rewritten
from tests.train.harness import run_forked

VARIABLE = re.compile(r"(export )?[A-Z_]+=.*")
PREFIX = ("-o", "--output-prefix")
SLOW = ("report", "accuracy", "simulate")  # run once with the same options, else parsed


@dataclass
class Runner:
    """ran: slow commands, shared by the documents' runners.

    jobs: trainings and profiles, whose flags finish() checks where Megatron is imported.
    """

    folder: Path
    ran: set = field(default_factory=set)
    variables: list[str] = field(default_factory=list)
    jobs: list[dict] = field(default_factory=list)

    def run(self, command: Command) -> None:
        """Fails for a command that is wrong, and for one that nobody knows how to run."""
        text = command.text.partition("  #")[0].strip()
        if reason_not_to_run(text) is not None:
            return
        if VARIABLE.fullmatch(text):
            self.variables.append(text)
            return
        words = self._expanded(rewritten(text))
        programs = {
            "megatron-paradyse": self._paradyse,
            "torchrun": self._torchrun,
            "make": self._make,
            "python": self._benchmark,
            "printf": self._shell,
        }
        assert words[0] in programs, f"nobody runs {text!r}: add it to tests/documentation/rules.py"
        programs[words[0]](words[1:], command)

    def finish(self) -> None:
        """Check the flags of all trainings and profiles in one process that has Megatron."""
        if self.jobs:
            results = self._fork(self.jobs)
            pairs = zip(self.jobs, results, strict=True)
            faults = [f"{job['words']}: {fault}" for job, fault in pairs if fault]
            assert not faults, "\n".join(faults)

    def _expanded(self, text: str) -> list[str]:
        """The words that a shell would hand over."""
        if text.startswith("printf"):
            return ["printf", text]  # with pipes and redirections
        lines = [*self.variables, f"words=( {text}", ")", 'printf "%s\\0" "${words[@]}"']
        result = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        )
        return result.stdout.split("\0")[:-1]

    def _shell(self, words: list[str], command: Command) -> None:
        subprocess.run(["bash", "-c", words[0]], cwd=self.folder, check=True)

    def _make(self, words: list[str], command: Command) -> None:
        """That there is such a target; what it does takes minutes."""
        subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True)

    def _benchmark(self, words: list[str], command: Command) -> None:
        """That it is there and knows its options; benchmarks take minutes."""
        assert words[0].startswith("benchmarks/"), command.text
        run = [sys.executable, str(ROOT / words[0]), "--help"]
        result = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60)
        assert all(option in result.stdout for option in words[1:]), command.text

    def _paradyse(self, words: list[str], command: Command) -> None:
        if all(word in COMMANDS or word == "--debug" for word in words):
            words = [*words, "--help"]  # named, not run
        if "--help" in words:
            self._in_this_process(words, command)
        elif words[0] in SLOW and self._ran_before(words):
            _parse(words)
        elif words[0] == "profile":
            self._profile(words[1:], ranks=None)
        elif words[0] == "simulate":
            (fault,) = self._fork([{"kind": "command", "words": words}])
            assert not fault, f"{command.text}: {fault}"
        else:
            self._in_this_process(words, command)

    def _in_this_process(self, words: list[str], command: Command) -> None:
        if words[0] == "train" and "--dry-run" not in words:
            words = [*words[:2], "--dry-run", *words[2:]]
        if words[:2] == ["data", "prepare"] and not command.expects_error:
            self._remove_data(words)
        result = CliRunner().invoke(cli, words, prog_name="megatron-paradyse")
        assert result.exit_code == int(command.expects_error), f"{command.text}\n{result.output}"
        if command.output and has_known_output(command.text):
            printed = [line.rstrip() for line in result.output.splitlines() if line.strip()]
            assert printed == list(command.output), command.text

    def _ran_before(self, words: list[str]) -> bool:
        """Whether it has run with the same options, and what it writes here is there."""
        outputs = [words[i + 1] for i, word in enumerate(words) if word in ("-o", "--output")]
        if words[0] == "simulate" and not (self.folder / outputs[0]).exists():
            return False
        options = {word for word in words if word.startswith("-")} - {"-o", "--output"}
        key = (words[0], frozenset(options | {word for word in words if word.endswith(".yaml")}))
        known = key in self.ran
        self.ran.add(key)
        return known

    def _remove_data(self, words: list[str]) -> None:
        prefix = next(words[i + 1] for i, word in enumerate(words) if word in PREFIX)
        for suffix in (".bin", ".idx", ".json"):
            (self.folder / f"{prefix}{suffix}").unlink(missing_ok=True)

    def _profile(self, words: list[str], *, ranks: int | None) -> None:
        """Its own options are parsed here, Megatron's flags where Megatron is."""
        options = _parse(["profile", *words])
        flags = list(options["flags"])
        ranks = ranks or options["nproc"] or options["stand_in"]
        assert ranks, words
        if flags[:1] != ["network"]:
            job = {"kind": "profile", "words": flags, "ranks": ranks, "model": options["model"]}
            self.jobs.append(job)

    def _torchrun(self, words: list[str], command: Command) -> None:
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(words)
        ranks, flags = int(options.nproc_per_node), options.training_script_args
        if not options.module:  # a page's own program, which test_library.py runs
            assert (self.folder / options.training_script).is_file(), command.text
            return
        if options.training_script == "megatron_paradyse":
            assert flags[0] == "profile", command.text
            self._profile(flags[1:], ranks=ranks)
            return
        if options.training_script == "megatron_paradyse.launch":
            assert (self.folder / flags[0]).is_file(), command.text
            flags = flags[1:]
        elif options.training_script == "megatron_paradyse.pretrain_bert":
            flags = [*flags, "--paradyse-model", "bert"]
        else:
            assert options.training_script == "megatron_paradyse.pretrain_gpt", command.text
        self.jobs.append({"kind": "parse", "words": flags, "ranks": ranks})

    def _fork(self, jobs: list[dict]) -> list[str]:
        """Their results, from a process in this folder that has Megatron imported."""
        given, results = self.folder / "jobs.json", self.folder / "results.json"
        given.write_text(json.dumps(jobs))
        code, _, stderr = run_forked(
            "tests.documentation.driver",
            [str(given), str(results)],
            ranks=1,
            folder=self.folder / "forked",
            timeout_seconds=120,
        )
        assert code == 0, stderr[-3000:]
        return json.loads(results.read_text())


def _parse(words: list[str]) -> dict:
    """The options of a command, as click reads them."""
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    return command.make_context(words[0], words[1:]).params
