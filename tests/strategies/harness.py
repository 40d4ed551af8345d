"""Run many cases on p gloo ranks, started once for all, and hand back what each case found."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = [  # once, for all ranks
    "torch.fx.experimental.symbolic_shapes",  # which torch imports at the first use of an operator
    "megatron_paradyse.strategies.metp",
    "tests.strategies.layers",
]
Job = Callable[..., Any]  # job(group, argument) -> a picklable result


class CaseFailedError(Exception):
    """A case raised on some rank; holds that rank's traceback."""


def run_ranks(
    p: int, job: Job, cases: Mapping[str, Any], *, timeout_seconds: float = 240.0
) -> dict[str, list[Any]]:
    """job(group, case) on each of p ranks, for every case in order: {name: results by rank}.

    Raises CaseFailedError with the case's name when one raises, TimeoutError when the whole takes
    longer than the limit (with the name of the case that was running).
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        ranks = [
            context.Process(target=_rank_main, args=(r, p, job, dict(cases), folder), daemon=True)
            for r in range(p)
        ]
        for rank in ranks:
            rank.start()
        try:
            _wait(ranks, Path(folder), time.monotonic() + timeout_seconds)
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
                rank.join()
        by_rank = [pickle.loads(Path(folder, f"result{r}").read_bytes()) for r in range(p)]
    return {name: [results[name] for results in by_rank] for name in cases}


def run_every_case(
    p: int, job: Job, cases: Mapping[str, Any], *, timeout_seconds: float = 240.0
) -> dict[str, list[Any] | str]:
    """As run_ranks, but what a case raises is its result, as a text, and the others still run.

    Where only some ranks raise, later cases may fail of it. Nothing is raised here.
    """
    try:
        found = run_ranks(p, partial(_caught, job), cases, timeout_seconds=timeout_seconds)
    except (CaseFailedError, TimeoutError) as error:
        return dict.fromkeys(cases, str(error))
    results: dict[str, list[Any] | str] = {}
    for name, by_rank in found.items():
        raised = "\n\n".join(text for text, _ in by_rank if text)
        results[name] = raised or [result for _, result in by_rank]
    return results


def _caught(job: Job, group, argument) -> tuple[str, Any]:
    try:
        return "", job(group, argument)
    except Exception:
        return f"on rank {group.rank()}:\n{traceback.format_exc()}", None


def _wait(ranks, folder: Path, deadline: float) -> None:
    while any(rank.is_alive() for rank in ranks):
        failed = [rank for rank in ranks if rank.exitcode not in (None, 0)]
        if failed or time.monotonic() > deadline:
            time.sleep(0.2)  # let the first to fail finish writing why
            break
        time.sleep(0.02)
    if all(rank.exitcode == 0 for rank in ranks):
        return
    errors = sorted(folder.glob("error*"), key=lambda path: path.stat().st_mtime)
    if errors:
        raise CaseFailedError("\n\n".join(path.read_text() for path in errors[:1]))
    running = {path.name: path.read_text() for path in sorted(folder.glob("running*"))}
    raise TimeoutError(f"ranks did not finish; exit codes {[r.exitcode for r in ranks]}: {running}")


def _rank_main(rank: int, p: int, job: Job, cases: dict[str, Any], folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=p, timeout=timedelta(seconds=60)
    )
    # Not the default group, so that whatever falls back on that one fails.
    group = dist.new_group(list(range(p)))
    results = {}
    for name, case in cases.items():
        Path(folder, f"running{rank}").write_text(name)
        try:
            results[name] = job(group, case)
        except BaseException:
            text = f"case {name!r} on rank {rank} of {p}:\n{traceback.format_exc()}"
            Path(folder, f"error{rank}").write_text(text)
            os._exit(1)
    Path(folder, f"result{rank}").write_bytes(pickle.dumps(results))
    dist.barrier()
    os._exit(0)  # nothing to flush; tearing gloo down costs seconds
