"""The paper's figure 2, table 5 and case study, run for real.

    python -m reproduction.measured figure2|table5|case_study [--scale tiny|full] [--models ...]
        [--distributions ...] [--as-published] [--output results/]

tiny: 4 ranks on this machine's cores, hidden size 256 (BERT 128), documents of the published
distributions times 1/64 and 1/128, memory enforced. full: the paper's shapes on 8 GPUs, documents
as long as published, the GPU's own memory; not yet run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import hardware, spawn
from benchmarks.dynamic_workload import profile_and_fit
from megatron_paradyse.data.distributions import DISTRIBUTIONS, draw_lengths
from megatron_paradyse.simulator.models import MODELS
from reproduction.names import AS_PUBLISHED, MEASURED, PARADYSE
from reproduction.options import parser
from reproduction.tables import (
    CASE_STUDY,
    FIGURE2,
    TABLE5,
    Row,
    of_panels,
    origin,
    update_table,
)

LLAMA = {
    "--swiglu": True,
    "--normalization": "RMSNorm",
    "--position-embedding-type": "rope",
    "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True,
}
SMALL = {"--num-layers": 4, "--hidden-size": 256, "--num-attention-heads": 8, "--vocab-size": 257}
SMALL |= {"--max-position-embeddings": 8192, "--attention-dropout": 0, "--hidden-dropout": 0}


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
        16,
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
    reader = parser(__doc__.splitlines()[0])
    reader.add_argument("what", choices=("figure2", "table5", "case_study"))
    reader.add_argument("--documents", type=int, help="of each distribution")
    reader.add_argument("--costs", type=Path, help="folder of cost files, made once and kept")
    arguments = reader.parse_args()
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

    def figure2(self) -> None:
        """Every strategy and ParaDySe over the same documents, sorted and shuffled.

        Replaces all rows of its panels: the seconds of one are of one run, and compare.
        """
        distributions = self._arguments.distributions
        policies = [AS_PUBLISHED] if self._arguments.as_published else [PARADYSE, AS_PUBLISHED]
        task = {"policies": policies, "lengths": self._lengths(distributions)}
        for model in self._arguments.models:
            rows = [{"model": model, **row} for row in self._ranks("figure2", model, task)]
            self._write("figure2", FIGURE2, rows, of_panels((model,), distributions))

    def table5(self) -> None:
        """What every part of the framework contributes, on the GPT and GRCh38 as in the paper."""
        model, distribution = "gpt", "grch38"
        task = {"lengths": self._lengths((distribution,))}
        rows = self._ranks("table5", model, task)
        rows = [{"model": model, "distribution": distribution, **row} for row in rows]
        self._write("table5", TABLE5, rows, of_panels((model,), (distribution,)))

    def case_study(self) -> None:
        """A restart, part by part, against a change of strategy from one microbatch to the next."""
        os.environ["REPRODUCTION_STARTED"] = repr(time.time())
        parts = self._spawn("reproduction.measured_restart", "gpt", {})
        switch = self._ranks("switch", "gpt", {"length": 512, "iterations": 24})
        parts = {**parts, "restart": sum(parts.values()), **switch}
        rows = [{"part": name, "seconds": seconds} for name, seconds in parts.items()]
        self._write("case_study", CASE_STUDY, rows, lambda row: True)

    def _lengths(self, distributions: Sequence[str]) -> dict[str, list[int]]:
        """Drawn like the published distributions, and the longest document of each."""
        count = self._arguments.documents or self._scale.documents
        lengths = {}
        for name in distributions:
            shrink = self._scale.shrink[name]
            drawn = draw_lengths(name, count - 1, shrink, 0).tolist()
            lengths[name] = [*drawn, int(DISTRIBUTIONS[name].max_tokens * shrink)]
        return lengths

    def _ranks(self, what: str, model: str, task: dict) -> Any:
        costs = self._costs(model)
        budget = None if self._scale.enforced else "device"
        task = {"what": what, "costs": costs, "budget": budget, **task}
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

    def _costs(self, model: str) -> str:
        """Measured on this machine by the commands that users run, and kept."""
        kept = self._arguments.costs or Path("build/reproduction/measured") / self._arguments.scale
        folder = kept / model
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "costs.json").exists():
            return str(folder / "costs.json")
        scale = self._scale
        return profile_and_fit(folder, self._flags(model), scale.profiled, False, ranks=scale.ranks)

    def _write(
        self,
        name: str,
        columns: Sequence[str],
        rows: list[dict],
        replaces: Callable[[Row], bool],
    ) -> None:
        path = self._arguments.output / f"{name}-{MEASURED}.csv"
        described = hardware()
        machine = described.get("gpu") or f"{described['cpu']}, {described['cores']} cores"
        update_table(path, columns, rows, made=origin(MEASURED, machine), replaces=replaces)
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
