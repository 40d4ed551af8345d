"""The store through which ranks speak outside of collectives: before there are any, or beside one.

It is torchrun's own where there is one; else the first rank serves it at MASTER_PORT, where
torch.distributed then finds it.
"""

from __future__ import annotations

import datetime
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from megatron_paradyse.errors import UserError

MEETING_SECONDS = 600  # until a rank that cannot reach the store gives up


def ranks() -> tuple[int, int]:
    """This process's rank and the number of ranks, as the launcher says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def check_launched() -> None:
    """UserError in a process that nothing tells where ranks meet: torch asks one rank alone too."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"no launcher started this rank, {' and '.join(missing)} not set: begin the command "
            "with torchrun --nproc-per-node P in the place of python, P = 1 for one rank"
        )


def meet(topic: str, *, seconds: float = MEETING_SECONDS) -> torch.distributed.Store:
    """A connection of its own to the store; keys of other topics and earlier starts are apart.

    seconds: that connecting may take. Raises UserError where the store cannot be reached.
    """
    rank, world = ranks()
    if world == 1:
        return torch.distributed.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = torch.distributed.TCPStore(
            host,
            port,
            is_master=serves(),
            wait_for_workers=False,
            multi_tenant=True,
            timeout=datetime.timedelta(seconds=seconds),
        )
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"rank {rank} cannot reach the other ranks at {host}:{port} ({reason}): see that the "
            "first rank runs and that its machine can be reached, then start again"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return torch.distributed.PrefixStore(f"paradyse/{topic}/{attempt}", store)


def served_by_a_rank() -> bool:
    """Whether the store lives in the process of the first rank, and goes with it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def serves() -> bool:
    """Whether the store lives in this process."""
    return served_by_a_rank() and ranks()[0] == 0


class Line:
    """Requests to a store whose process may be stopped: torch's own would wait for ever.

    One thread makes them all: at the interpreter's end, when ranks say how they end, no other can
    be started.
    """

    def __init__(self, topic: str, *, seconds: float):
        """seconds: that an answer may take, later on. UserError if the store cannot be reached."""
        self._topic, self._seconds = topic, seconds
        self._store: torch.distributed.Store | None = meet(topic)  # others may start much later
        self._asking = threading.Lock()
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"paradyse-{topic}-line", daemon=True).start()

    def ask(self, make: Callable[[torch.distributed.Store], Any]) -> Any:
        """What make(store) gives; None where no answer came in time."""
        if not self._asking.acquire(timeout=self._seconds):  # an earlier request still waits
            return None
        request = _Request(make)
        self._requests.put(request)
        request.over.wait(self._seconds)
        return request.answer

    def _serve(self) -> None:
        while True:
            request = self._requests.get()
            try:
                if self._store is None:
                    self._store = meet(self._topic, seconds=self._seconds)
                request.answer = request.make(self._store)
            except (RuntimeError, UserError):
                self._store = None  # a late answer could be taken for that to the next request
            finally:
                self._asking.release()
                request.over.set()


class _Request:
    def __init__(self, make: Callable[[torch.distributed.Store], Any]):
        self.make = make
        self.answer: Any = None
        self.over = threading.Event()
