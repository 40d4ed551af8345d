"""How much memory a rank may use, and what happens when it is not enough."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.training import print_rank_0

from megatron_paradyse.machine import free_bytes
from megatron_paradyse.planner.from_file import RESERVE_SHARE
from megatron_paradyse.planner.pipeline import UNLIMITED
from megatron_paradyse.settings import Settings
from megatron_paradyse.train.memory_record import Start, grid, memory_bytes
from megatron_paradyse.units import bytes_text, counted, parse_bytes

HOST_SHARE = 0.8  # of free host memory: data, checkpoints and the system take the rest
TAUGHT_MARGIN = 0.02  # what a plan that ran out of memory is believed to have lacked


def budget_bytes(settings: Settings, *, costs: str, records: Sequence[Path] = ()) -> int:
    """The budget of this run, the least of any rank: replicas then deal and plan alike.

    A GPU without --paradyse-memory-budget: what is free before the model is built, less a
    reserve. records: files of earlier starts (memory_record.files_to_read), whose plans that ran
    out of memory lower the budget. costs: see name_of_costs. All ranks must call it.
    """
    if settings.memory_budget is not None:
        budget = parse_bytes(settings.memory_budget)
    elif torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        budget = free + torch.cuda.memory_reserved() - int(RESERVE_SHARE * total)
    else:
        budget = UNLIMITED
    taught = min([UNLIMITED, *_taught(records, settings, costs)])
    least = torch.tensor([budget, taught], device=torch.cuda.current_device())
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    if least[1] < taught:
        print_rank_0(
            "> paradyse: what another rank reads, its trace or its folder of checkpoints, tells of "
            f"plans that ran out of memory: the budget is at most {bytes_text(int(least[1]))}, "
            "until that file is removed"
        )
    return int(least.min())


def host_bytes(settings: Settings) -> int | None:
    """Host memory that this rank's +offload may take, the least of any rank; None: not known.

    All ranks must call it.
    """
    if settings.host_memory is not None:
        found: int | None = parse_bytes(settings.host_memory)
    else:
        free, ranks = free_bytes(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        found = None if free is None else int(HOST_SHARE * free) // ranks
    least = torch.tensor(
        [UNLIMITED if found is None else found], device=torch.cuda.current_device()
    )
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return None if int(least) == UNLIMITED else int(least)


def _taught(records: Sequence[Path], settings: Settings, costs: str) -> list[int]:
    """Budgets at which plans that ran out of memory in earlier runs are not chosen."""
    here, margin = Start(grid(), costs, memory_bytes(settings)), settings.memory_margin
    found = {path: budgets for path in records if (budgets := _budgets_of(path, here, margin))}
    if not found:
        return []
    path = min(found, key=lambda path: min(found[path]))
    plans = counted(len(set(found[path])), "plan")  # each rank that had one has left a record
    print_rank_0(
        f"> paradyse: {path} tells of {plans} that ran out of memory: the budget is at most "
        f"{bytes_text(min(found[path]))}, until that file is removed"
    )
    return found[path]


def _budgets_of(path: Path, here: Start, margin: float) -> list[int]:
    """By each record of a file that holds for this start, as it says itself, or in a trace the
    start before it.

    Such a plan had predicted_peak_bytes by the cost model, with the margin of this start on top:
    below that less TAUGHT_MARGIN it is not chosen again. Where corrections had raised that, a
    start, which has none yet, predicts uncorrected_peak_bytes. Where experts lie over several
    replicas the plan may be of a microbatch that held another's tokens: no less than the budget of
    its start less that margin follows.
    """
    found = []
    started = here.grid
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if '"out_of_memory"' not in line and '"run"' not in line:
                continue
            try:
                record = json.loads(line)
                if record["kind"] == "run":
                    started = _grid_of(record)
                    continue
                predicted = record["predicted_peak_bytes"]
                predicted = min(predicted, record.get("uncorrected_peak_bytes") or predicted)
                alone = int(predicted * (1 + margin))
                limit = int(
                    max(alone, record.get("shared_budget_bytes") or 0) * (1 - TAUGHT_MARGIN)
                )
                holds = here.has_like(record, started)
            except (ValueError, TypeError, KeyError, OverflowError):
                continue
            if holds:
                found.append(limit)
    return found


def _grid_of(run: dict[str, Any]) -> list[Any]:
    """Of a start in a trace, as memory_record.grid has it."""
    ranks = run["ranks"]
    return [run["hardware"]["name"], ranks["tensor"], ranks["pipeline"]]
