"""One rank of benchmarks/max_length.py --real."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.dynamic_workload_rank import Workload
from benchmarks.iterations import start_rank
from megatron_paradyse.policy import FixedPolicy
from megatron_paradyse.units import parse_bytes


def main() -> None:
    task = json.loads(os.environ["MAX_LENGTH"])
    start_rank()
    import torch

    workload = Workload(task["costs"])
    workload.budget = parse_bytes(task["budget"])
    rows = [
        row
        for name, tokens in task["limits"].items()
        for row in compare(workload, name, tokens, task["factors"])
    ]
    if torch.distributed.get_rank() == 0:
        Path(task["output"]).write_text(json.dumps(rows))
    torch.distributed.destroy_process_group()


def compare(workload: Workload, name: str, limit: int, factors: list[float]) -> list[dict]:
    """The peak of one iteration at shares of the predicted limit, on the largest rank."""
    if name == "ParaDySe":
        workload.policies[name] = workload.chooser("optimal", memory_margin=0.0)
    else:
        workload.policies[name] = FixedPolicy(name)
    rows = []
    for factor in factors:
        tokens = workload.padded(int(factor * limit))
        peak = workload.peak(name, tokens)
        rows.append(
            {
                "strategy": name,
                "predicted_limit": limit,
                "factor": factor,
                "tokens": tokens,
                "peak_bytes": peak,
                "fits": peak <= workload.budget,
            }
        )
        if os.environ["RANK"] == "0":
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
