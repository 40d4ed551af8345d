"""Simulated cost files of the paper's models on 8 x A100 80 GB: `simulate`, then `fit`.

Two heads: in tiles, as training runs it, and Megatron's own on the whole sequence, as the paper
did. Only embedding and head are simulated a second time for that; the layers do not change. Files
are kept in build/reproduction under a digest of the package's sources, so that costs of other
code are never used.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import megatron_paradyse
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.model import HYBRID, PAPER
from megatron_paradyse.costs.table import (
    ATTENTION,
    BYTES_ONLY,
    LAYER,
    MLP,
    MODEL,
    OK,
    CostTable,
    Measurement,
    edges_of,
)
from megatron_paradyse.preview.longest import find_longest
from megatron_paradyse.preview.setup import make_setup
from reproduction.names import FIXED
from reproduction.options import ROOT

DEVICE, RANKS, DTYPE = "a100-80g", 8, "bfloat16"
HARDWARE = f"{RANKS} x {DEVICE}, {DTYPE}"
STATE_BYTES = 16  # of a parameter, its gradient and optimizer states; as benchmarks/max_length.py
# From half a thousand tokens to beyond what any plan can train.
LENGTHS = {
    "gpt": "512,2K,8K,16K,32K,64K,128K,192K,384K,640K,1M",
    "llama": "512,2K,8K,16K,32K,64K,128K,256K,512K,1M,1536K",
    "bert": "512,2K,8K,32K,64K,128K,256K,1M,4M,12M",
}
COARSE_LENGTHS, COARSE_STRATEGIES = "512,16K,256K", ("megatron_ts", "megatron_ts+recompute")
TILED, UNTILED = "tiled", "untiled"
HEADS = (TILED, UNTILED)
PAPER_SPARSE = "paper-sparse"  # the published fit of the simulated lengths alone
PUBLISHED_LENGTHS = 32
CHEAPEST = "megatron_ts"  # where only embedding and head are wanted
AT_ONCE = int(os.environ.get("JOBS", "2"))  # simulations


@dataclass(frozen=True)
class ModelCosts:
    """The cost files of one model, by kind of fit and of head.

    coarse: of few lengths and two strategies, in no time, to see that what reads them runs.
    """

    model: str
    folder: Path
    coarse: bool = False

    def path(self, kind: str = HYBRID, head: str = TILED) -> Path:
        """A fitted cost file; made where it is missing."""
        path = self.folder / f"{self.model}-{head}-{kind}.json"
        if not path.is_file():
            table = read_cost_file(self._raw(head)).table
            if head == UNTILED:
                table = with_edges_of(read_cost_file(self._raw(TILED)).table, table)
            if kind == PAPER:
                table = published_profile(table, self._limits(head))
            fit = HYBRID if kind == HYBRID else PAPER
            write_cost_file(path, table, fit_table(table, fit))
        return path

    def _limits(self, head: str) -> dict[str, int]:
        """The longest sequence of each of the paper's strategies alone."""
        flags = {"policy": "optimal", "strategies": ",".join(FIXED)}
        flags |= {"head_tile": "off"} if head == UNTILED else {}
        found = find_longest(make_setup(str(self.path(HYBRID, head)), flags))
        return {limit.strategy: limit.tokens for limit in found.single}

    def _raw(self, head: str) -> Path:
        path = self.folder / f"{self.model}-{head}-raw.json"
        if not path.is_file():
            flags = ["--strategies", CHEAPEST] if head == UNTILED else []
            flags += ["--strategies", ",".join(COARSE_STRATEGIES)] if self.coarse else []
            flags += ["--lengths", COARSE_LENGTHS if self.coarse else LENGTHS[self.model]]
            flags += ["--paradyse-head-tile", "off"] if head == UNTILED else []
            run_simulator(path, self.model, flags, ranks=RANKS)
        return path


def with_edges_of(layers: CostTable, edges: CostTable) -> CostTable:
    """A table's layers with another's embedding and head, simulated at the same lengths."""
    if layers.lengths() != edges.lengths():
        raise ValueError(f"lengths differ: {layers.lengths()} and {edges.lengths()}")
    kept = layers.only(lambda m: m.strategy != MODEL).measurements
    taken = edges.only(lambda m: m.strategy == MODEL).measurements
    return dataclasses.replace(edges, measurements=(*taken, *kept))


def published_profile(table: CostTable, limits: dict[str, int]) -> CostTable:
    """What a profile for the published fit would be: every strategy up to the longest that fits.

    The paper profiles until memory runs out, and does not say at how many lengths: 32, log-spaced,
    valued by the package's fit. Embedding and head: up to the longest of all.
    """
    model, shortest = fit_table(table, HYBRID), table.lengths()[0]
    edges = edges_of(table.description)
    step = 2 * table.description.p
    measurements = []
    for strategy, longest in {**limits, MODEL: max(limits.values())}.items():
        spaced = np.geomspace(shortest, max(longest, 2 * shortest), PUBLISHED_LENGTHS)
        for s in sorted({round(s / step) * step for s in spaced}):
            for operation in edges if strategy == MODEL else (ATTENTION, MLP):
                costs = dataclasses.astuple(model.operation(strategy, operation, s))
                measurements.append(Measurement(strategy, operation, s, 1, OK, *costs))
    # The gather buffer in the static bytes has the longest length's size.
    end = Measurement(CHEAPEST, LAYER, table.lengths()[-1], 1, BYTES_ONLY)
    return dataclasses.replace(table, measurements=(*measurements, end))


def run_simulator(output: Path, model: str, flags: list[str], *, ranks: int) -> None:
    """`megatron-paradyse simulate` into output."""
    command = [sys.executable, "-m", "megatron_paradyse", "simulate", "--gpu", DEVICE]
    command += ["--ranks", str(ranks), "--model", model, "--dtype", DTYPE]
    command += ["--state-bytes", str(STATE_BYTES), "-o", str(output), *flags]
    subprocess.run(command, check=True, timeout=1800, stdout=subprocess.DEVNULL, cwd=ROOT)


def simulated_costs(models: tuple[str, ...], folder: Path | None = None) -> dict[str, ModelCosts]:
    """The costs of the models, those that are missing simulated, two at once."""
    folder = folder or ROOT / "build" / "reproduction" / sources_digest()
    folder.mkdir(parents=True, exist_ok=True)
    found = {model: ModelCosts(model, folder) for model in models}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for head in HEADS:
            list(pool.map(functools.partial(ModelCosts._raw, head=head), found.values()))
    return found


def sources_digest() -> str:
    """Of the package's Python files, and of what is simulated."""
    digest = hashlib.sha256(repr((LENGTHS, DEVICE, RANKS, DTYPE, STATE_BYTES)).encode())
    root = Path(megatron_paradyse.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
