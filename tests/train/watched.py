"""A rank of the watchdog's tests, without Megatron: watched LIMIT FAULT RANK; it does FAULT there.

Ranks agree on nothing else; all wait in an all_reduce that RANK never joins, or end well; with
"errors" each ends with another one; with "early" RANK ends well before the others do, and nobody
stops its watchdog but the interpreter at its end, or with "measured" what ends a rank of a profile.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time

import torch

from megatron_paradyse.errors import UserError
from megatron_paradyse.profiler.start import as_rank
from megatron_paradyse.train.watchdog import Watchdog

FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def main() -> None:
    limit, fault, rank = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    own = int(os.environ["RANK"])
    dog = Watchdog(limit)
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    torch.distributed.barrier()
    dog.start()
    torch.distributed.barrier()
    if own == rank and fault in FAULTS:
        FAULTS[fault]()
    if own == rank and fault == "error":
        raise UserError("this file is wrong: give another")
    if fault == "errors":
        raise UserError(f"file {own} is wrong: give another")
    if fault == "early":
        return time.sleep(0 if own == rank else 3 * limit)
    if fault == "measured":
        as_rank(lambda report: time.sleep(0 if own == rank else 3 * limit))
    if own == rank and fault == "slow":
        release(own, limit)
    torch.distributed.all_reduce(torch.ones(1))
    dog.stop()


def release(own: int, limit: float) -> None:
    """Come late, but come."""
    import threading

    threading.Event().wait(1.5 * limit)


if __name__ == "__main__":
    main()
