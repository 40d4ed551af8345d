"""Starts the ranks of a training by forking a process that has imported Megatron already.

Importing Megatron and its tokenizers takes each rank longer than a small training does. Requests
come as one JSON line on stdin, {"ranks", "module", "argv", "folder", "timeout_seconds"}; the answer
is one line, the exit code. Ranks write FOLDER/stdout and FOLDER/stderr. Like torchrun, one failed
rank ends the others; with "each": true none is ended before the limit, and the answer is the list
of the exit codes, null for a rank that had to be ended.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from megatron_paradyse.ports import free_port

FOLLOWS = 3  # watchdog.EXIT_CODE: a rank ends, for another one has
# No other imports here: the helper process of a rank's first checkpoint repeats them.


def serve() -> None:
    from megatron_paradyse.train import plugin

    plugin.install()
    import megatron.core.models.mimo
    import megatron.core.tokenizers.text.libraries
    import megatron.core.tokenizers.text.models  # noqa: F401
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async.get_write_results_queue = functools.partial(
        filesystem_async.get_write_results_queue, mp_mode="fork"
    )  # spawned, what collects the results of a rank's writers would import torch first
    _describe_flags_once()
    _look_once()
    import megatron_paradyse.profiler.run
    import megatron_paradyse.train.auto_costs
    import megatron_paradyse.train.gpt
    import megatron_paradyse.train.packed_steps
    import megatron_paradyse.train.session  # noqa: F401
    import tests.train.compare_plans
    import tests.train.driver  # noqa: F401

    gc.freeze()  # ranks need not look through what they inherit, nor copy its pages
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _describe_flags_once() -> None:
    """Megatron reads the texts of its flags from its own source, in every process that parses."""
    from megatron.training import arguments
    from megatron.training.argument_utils import ArgumentGroupFactory as Group

    read = Group._get_field_docstrings
    once = functools.cache(lambda described: read(Group.__new__(Group), described))
    Group._get_field_docstrings = lambda self, described: once(described)
    arguments.add_megatron_arguments(argparse.ArgumentParser())


def _look_once() -> None:
    """What every rank finds the same, where looking for it takes as long as training does.

    The entry points of all packages, the strategies, and the digest of this package's code. And
    wandb hears each line that is printed, though no test reports to it.
    """
    from importlib import metadata

    from megatron_paradyse import strategies
    from megatron_paradyse.train import agreement

    metadata.entry_points = functools.cache(metadata.entry_points)
    metadata.entry_points(group="torch.distributed.backends")
    for name in strategies.strategy_names():
        strategies.get_strategy(name)  # imports it
    agreement.sources()
    for stream in (sys.stdout, sys.stderr):
        vars(stream).pop("write", None)


def _run(request: dict) -> int | list[int | None]:
    port = free_port()
    children = {}
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            _become_rank(request, rank, port)
        children[pid] = rank
    groups = list(children)
    deadline = time.monotonic() + request["timeout_seconds"]
    answer: int | list[int | None]
    answer = (
        _wait_for_each(children, deadline) if request.get("each") else _wait(children, deadline)
    )
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for pid in groups:  # helpers of checkpoints, which a rank leaves behind at os._exit
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return answer


def _wait_for_each(children: dict[int, int], deadline: float) -> list[int | None]:
    """The exit codes by rank; drops the ended."""
    codes: list[int | None] = [None] * len(children)
    while children and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif all(_is_stopped(child) for child in children):
            break
        else:
            time.sleep(0.02)
    return codes


def _is_stopped(process: int) -> bool:
    """By SIGSTOP: it would never end."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _wait(children: dict[int, int], deadline: float) -> int:
    """Until all ended well (0), one failed (its code) or the time is up (124); drops the ended."""
    while children:
        failed = [code for code in _ended(children) if code]
        if failed == [FOLLOWS]:
            time.sleep(0.2)  # the one that it follows closes its sockets before it has ended
            failed += [code for code in _ended(children) if code]
        if failed:
            return next((code for code in failed if code != FOLLOWS), FOLLOWS)
        if time.monotonic() > deadline:
            return 124
        time.sleep(0.02)
    return 0


def _ended(children: dict[int, int]) -> list[int]:
    """The codes of those that have ended since; drops them."""
    codes = []
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        children.pop(pid)
        codes.append(os.waitstatus_to_exitcode(status))
    return codes


def _become_rank(request: dict, rank: int, port: int) -> None:
    from megatron_paradyse.train import watchdog

    code = 1
    os.setpgid(0, 0)
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            path = Path(request["folder"]) / name
            os.dup2(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY), number)
        ranks = request["ranks"]
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        sys.argv = [request["module"], *request["argv"]]
        importlib.import_module(request["module"]).main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # as the interpreter would
    finally:
        if code == 0 and (dog := watchdog.current()) is not None:
            dog.stop()  # as at the end of the interpreter
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
