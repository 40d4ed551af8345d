"""A process with a manager, as Megatron's first save starts one: managing WHEN; it dies WHEN.

"starting": as soon as the helper's process exists. "serving": when it answers; its number is
printed then.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing.context import SpawnProcess

from megatron_paradyse.train.helper_processes import managers_end_with_this_process


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    if sys.argv[1] == "starting":
        start = SpawnProcess.start

        def start_and_die(process: SpawnProcess) -> None:
            start(process)
            die()

        SpawnProcess.start = start_and_die  # type: ignore[method-assign]
    with managers_end_with_this_process():
        manager = multiprocessing.get_context("spawn").Manager()
    manager.Queue().put(1)
    print(manager._process.pid, flush=True)
    if sys.argv[1] == "serving":
        die()
    manager.shutdown()


if __name__ == "__main__":
    main()
