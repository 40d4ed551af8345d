"""The paper's figure 2, table 5 and case study, run for real.

    python -m reproduction.measured figure2|table5|case_study [--scale tiny|full] [--models ...]
        [--distributions ...] [--as-published] [--output results/]

tiny: 4 ranks on this machine's cores, hidden size 256 (BERT 128), documents of the published
distributions times 1/64 and 1/128, memory enforced. full: the paper's shapes on 8 GPUs, documents
as long as published, the GPU's own memory; not yet run.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import hardware, spawn, versions
from megatron_paradyse.data.distributions import DISTRIBUTIONS, draw_lengths
from megatron_paradyse.simulator.models import MODELS

PUBLISHED, OURS = "paradyse-as-published", "paradyse"
LLAMA = {
    "--swiglu": True,
    "--normalization": "RMSNorm",
    "--position-embedding-type": "rope",
    "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True,
}
SMALL = {"--num-layers": 4, "--hidden-size": 256, "--num-attention-heads": 8, "--vocab-size": 257}
SMALL |= {"--max-position-embeddings": 8192, "--attention-dropout": 0, "--hidden-dropout": 0}
FIGURE_COLUMNS = (
    *("model", "distribution", "order", "policy"),
    *("document", "tokens", "seconds", "peak_bytes", "plan"),
)
ABLATION_COLUMNS = (
    *("model", "distribution", "framework", "max_tokens", "cumulative_seconds"),
    *("full_seconds_to_same_length", "saved_share", "ci_low", "ci_high"),
)


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large the runs are. profiled: the lengths that costs are measured at."""

    ranks: int
    models: dict[str, dict[str, Any]]
    shrink: dict[str, float]
    documents: int
    profiled: str
    enforced: bool  # memory: a budget at which the fastest strategy stops early, or the GPU's


SCALES = {
    "tiny": Scale(
        4,
        {
            "bert": {**SMALL, "--hidden-size": 128, "--paradyse-model": "bert"},
            "llama": {**SMALL, "--ffn-hidden-size": 688, **LLAMA},
            "gpt": SMALL,
        },
        {"githubcode": 1 / 64, "grch38": 1 / 128},
        24,
        "64,256,1K,2560,5K",
        True,
    ),
    "full": Scale(
        8,
        {
            name: {**flags, "--attention-dropout": 0, "--hidden-dropout": 0, "--bf16": True}
            for name, flags in MODELS.items()
        },
        {"githubcode": 1.0, "grch38": 1.0},
        200,
        "1K,2K,4K,8K,16K,32K,64K,128K",
        False,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("figure2", "table5", "case_study"))
    parser.add_argument("--scale", choices=SCALES, default="tiny")
    parser.add_argument("--models", default="bert,llama,gpt")
    parser.add_argument("--distributions", default="githubcode,grch38")
    parser.add_argument("--as-published", action="store_true", help="leave out our own defaults")
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--documents", type=int, help="of each distribution")
    parser.add_argument("--costs", type=Path, help="folder of cost files, made once and kept")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(arguments, SCALES[arguments.scale], Path(folder))
        getattr(run, arguments.what)()
    print(f"{arguments.what}: {time.monotonic() - start:.0f} s", file=sys.stderr)


class Run:
    """One of the results; folder is for files that nobody keeps."""

    def __init__(self, arguments: argparse.Namespace, scale: Scale, folder: Path):
        self._arguments, self._scale, self._folder = arguments, scale, folder
        self._models = _chosen(arguments.models, scale.models)
        self._distributions = _chosen(arguments.distributions, scale.shrink)

    def figure2(self) -> None:
        """Every strategy and ParaDySe over the same documents, sorted and shuffled."""
        rows = []
        for model in self._models:
            policies = [PUBLISHED] if self._arguments.as_published else [OURS, PUBLISHED]
            task = {"policies": policies, "lengths": self._lengths()}
            for row in self._ranks("figure2", model, task):
                rows.append({"model": model, **row})
            self._write("figure2-measured.csv", FIGURE_COLUMNS, rows)  # so far

    def table5(self) -> None:
        """What every part of the framework contributes, on the GPT and GRCh38 as in the paper."""
        model, distribution = "gpt", "grch38"
        lengths = {distribution: self._lengths()[distribution]}
        rows = self._ranks("table5", model, {"lengths": lengths, "seed": 0})
        rows = [{"model": model, "distribution": distribution, **row} for row in rows]
        self._write("table5-measured.csv", ABLATION_COLUMNS, rows)

    def case_study(self) -> None:
        """A restart, part by part, against a change of strategy from one microbatch to the next."""
        os.environ["REPRODUCTION_STARTED"] = repr(time.time())
        parts = self._spawn("reproduction.measured_restart", "gpt", {})
        switch = self._ranks("switch", "gpt", {"length": 512, "iterations": 24})
        parts = {**parts, "restart": sum(parts.values()), **switch}
        rows = [{"part": name, "seconds": seconds} for name, seconds in parts.items()]
        self._write("case_study-measured.csv", ("part", "seconds"), rows)

    def _lengths(self) -> dict[str, list[int]]:
        """Drawn like the published distributions, and the longest document of each."""
        count = self._arguments.documents or self._scale.documents
        lengths = {}
        for name in self._distributions:
            shrink = self._scale.shrink[name]
            drawn = draw_lengths(name, count - 1, shrink, 0).tolist()
            lengths[name] = [*drawn, int(DISTRIBUTIONS[name].max_tokens * shrink)]
        return lengths

    def _ranks(self, what: str, model: str, task: dict) -> Any:
        costs = self._costs(model)
        budget = None if self._scale.enforced else "device"
        task = {"what": what, "costs": str(costs), "budget": budget, **task}
        return self._spawn("reproduction.measured_rank", model, task)

    def _spawn(self, module: str, model: str, task: dict) -> Any:
        output = self._folder / "result.json"
        os.environ["REPRODUCTION"] = json.dumps({**task, "output": str(output)})
        spawn(module, self._flags(model), ranks=self._scale.ranks, timeout_seconds=7200)
        return json.loads(output.read_text())

    def _flags(self, model: str) -> list[str]:
        flags = []
        for name, value in self._scale.models[model].items():
            flags += [name] if value is True else [name, str(value)]
        return [*flags, "--seq-length", "8192"]

    def _costs(self, model: str) -> Path:
        """Measured on this machine by the commands that users run; kept where the user says."""
        kept = Path("build/reproduction/measured") / self._arguments.scale
        folder = self._arguments.costs or kept
        folder.mkdir(parents=True, exist_ok=True)
        raw, fitted = folder / f"{model}-raw.json", folder / f"{model}.json"
        if fitted.exists():
            return fitted
        command = [sys.executable, "-m", "megatron_paradyse"]
        profile = [*command, "profile", "--nproc", str(self._scale.ranks), "--output", str(raw)]
        profile += ["--lengths", self._scale.profiled, *self._flags(model)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(profile, check=True, timeout=3600, env=environment, stdout=sys.stderr)
        fit = [*command, "fit", str(raw), "-o", str(fitted)]
        subprocess.run(fit, check=True, timeout=600, stdout=sys.stderr)
        return fitted

    def _write(self, name: str, columns: tuple[str, ...], rows: list[dict]) -> None:
        path = self._arguments.output / name
        described = hardware()
        machine = described.get("gpu") or f"{described['cpu']}, {described['cores']} cores"
        text = ", ".join(f"{key} {value}" for key, value in versions().items())
        with path.open("w", newline="") as file:
            file.write(f"# source: measured; {machine}; {time.strftime('%Y-%m-%d')}; {text}\n")
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        print(f"wrote {path}", file=sys.stderr)


def _chosen(names: str, known: dict) -> list[str]:
    chosen = [name.strip().lower() for name in names.split(",")]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        sys.exit(f"error: {unknown[0]!r} is not one of {', '.join(known)}")
    return chosen


if __name__ == "__main__":
    main()
