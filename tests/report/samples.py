"""Traces and costs to draw, invented."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

from click.testing import CliRunner

from megatron_paradyse.cli import cli
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from tests.costs.synthetic import make_table

BUDGET = 500_000_000
STAGE = {
    "budget_bytes": BUDGET,
    "static_bytes": 100_000_000,
    "has_embedding": True,
    "has_head": True,
    "buffer_bytes_per_token": 1024,
    "buffer_free_above": None,
    "angle_bytes_per_position": 0,
    "input_bytes_per_token": 256.0,
    "host_bytes": 1 << 34,
    "num_in_flight": 1,
    "margin": 0.03,
}
RUN = {
    "kind": "run",
    "date": "2026-11-21T12:00:00+00:00",
    "version": "0.1.0",
    "policy": "optimal",
    "strategies": ["megatron_ts", "ulysses_z", "metp", "metp+recompute"],
    "costs": {
        "path": "costs.json",
        "fingerprint": "0",
        "source": "simulated",
        "hardware": "synthetic",
        "date": "2026-01-01",
    },
    "memory_budget_bytes": BUDGET,
    "memory_margin": 0.03,
    "stages": [STAGE],
    "ranks": {"world": 4, "tensor": 4, "pipeline": 1, "data": 1},
    "hardware": {"name": "synthetic", "kind": "cpu", "memory_bytes": 1 << 33, "num_devices": 4},
    "dtype": "float32",
    "model": {"num_layers": 4, "hidden_size": 256},
}
PLANS = ("1-4 megatron_ts", "1-2 ulysses_z/metp, 3-4 ulysses_z", "1 metp+recompute, 2-4 metp")
LENGTHS = (128, 1000, 4096, 8192)
PADDING = 5


def microbatch(iteration: int, seq_length: int = 1024, plan: str = PLANS[0], **more) -> dict:
    return {
        "kind": "microbatch",
        "iteration": iteration,
        "microbatch": 0,
        "batch_size": 1,
        "seq_length": seq_length,
        "plan": plan,
        "switched": False,
        "planner_microseconds": 10.0,
        "predicted_seconds": 0.11,
        "predicted_peak_bytes": 210_000_000,
        "seconds": 0.1,
        "peak_bytes": 200_000_000,
        **more,
    }


def iteration(number: int, **more) -> dict:
    values = {"tokens": 1000, "shortest_sequence_tokens": 10, "longest_sequence_tokens": 990}
    return {"kind": "iteration", "iteration": number, "seconds": 0.5, **values, **more}


def records(count: int = 8, *, run: dict | None = RUN) -> list[dict]:
    """A training whose lengths and plans go round."""
    found = [] if run is None else [run]
    for i in range(count):
        plan = PLANS[i % len(PLANS)]
        found += [
            microbatch(i + 1, LENGTHS[i % len(LENGTHS)], plan, switched=i > 0),
            iteration(i + 1, longest_sequence_tokens=LENGTHS[i % len(LENGTHS)] - PADDING),
        ]
    return found


def write_trace(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_costs(path: Path) -> Path:
    names = ("megatron_ts", "ulysses_z", "metp", "metp+recompute")
    table = make_table(lengths=(128, 512, 2048, 8192), strategies=names)
    write_cost_file(path, table, fit_table(table))
    return path


def fitted(folder: Path):
    return read_cost_file(write_costs(folder / "costs.json"))


def report(*arguments: object):
    """What `megatron-paradyse report` with these says and ends with."""
    return CliRunner().invoke(cli, ["report", *map(str, arguments)])


def elements(page: ET.Element, tag: str) -> list[ET.Element]:
    """Those of a tag, whatever their namespace."""
    return [e for e in page.iter() if isinstance(e.tag, str) and e.tag.split("}")[-1] == tag]
