"""Ends a rank that waits in vain for another one, with a line that names who is missing and where.

A thread of every rank writes a sign of life to the ranks' store and reads the others'. A rank is
missing when its process has ended (at once, on the same machine), or when no sign came for the
limit: it is stopped, or its machine is gone. A rank that is only slow is told of once, by those who
wait for it, and training goes on.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

from torch.distributed import Store

from megatron_paradyse.errors import say_error
from megatron_paradyse.train.ending import leave
from megatron_paradyse.train.meeting import Line, ranks, served_by_a_rank, serves
from megatron_paradyse.train.peers import Beat, own_beat, state_here
from megatron_paradyse.train.whereabouts import Lookout

EXIT_CODE = 3
ALL_WATCHED = 32  # with more ranks each watches its neighbour only; what it finds ends the others
TRIES = 5  # to tell how this rank ends, while the store is busy
SECONDS_TO_HEAR = 5  # for others to read how the rank with the store ends
SECONDS_TO_END = 20  # for others to end by themselves after one ended with an error
REMEDY = "see what ended it (its log, the kernel's), then start again from the last checkpoint"

_current: Watchdog | None = None


def current() -> Watchdog | None:
    return _current


class Watchdog:
    """start() once all ranks are there; stop() when this one has done its work."""

    def __init__(self, limit_seconds: float):
        self._limit = limit_seconds
        self._interval = min(max(limit_seconds / 8, 0.1), 1.0)
        self._answer_seconds = min(max(limit_seconds / 2, 1.0), 30.0)
        self._rank, self._world = ranks()
        self._line = Line("watchdog", seconds=self._answer_seconds)
        self._own = own_beat(self._rank)
        self._seen: dict[int, Beat] = {}
        self._since: dict[int, float] = {}  # when the last sign of a rank came
        self._stopped: dict[int, float] = {}  # since when its process is known to be stopped
        self._answered = time.monotonic()  # when the store did
        self._over = threading.Event()
        self._moved, self._signature = time.monotonic(), 0
        self._failed_at: TracebackType | None = None
        self._lookout = Lookout()
        self._told = False
        self._ends = threading.Lock()
        self.doing: Callable[[], tuple[str, tuple[str, ...]]] = lambda: ("", ())
        self._say()
        global _current
        _current = self

    def start(self) -> None:
        """All ranks must have made theirs."""
        self._read()
        threading.Thread(target=self._run, name="paradyse-watchdog", daemon=True).start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """This rank is done."""
        self._tell_end("done")

    def failed(self, words: str) -> None:
        """This rank ends with an error."""
        self._tell_end(f"rank {self._rank} has ended: {words}")

    def _tell_end(self, how: str) -> None:
        """Tell the others how this rank ends, and watch no longer.

        One that only follows another says of itself what that one said.

        The rank whose process holds the store waits for a moment until they have heard it, or, if
        all went well, until they have ended too.
        """
        if self._own.end is not None:
            return
        self._over.set()
        self._own.end = how[:300]
        for _ in range(TRIES):
            if self._store_has_gone() or self._say():
                break
        if serves():
            well = how == "done"
            deadline = time.monotonic() + (SECONDS_TO_END if well else SECONDS_TO_HEAR)
            while time.monotonic() < deadline and not self._all_ended(or_heard=not well):
                time.sleep(0.02)

    def first_words(self, words: str) -> tuple[int, str]:
        """The first rank that ended with an error, and its words; this one's without an answer."""
        own = f"{self._rank} {words}"
        found = self._line.ask(lambda store: store.compare_set("words", "", own))
        rank, _, said = (found.decode() if found else own).partition(" ")
        return int(rank), said

    def lost_a_peer(self, traceback: TracebackType | None, seconds: float | None = None) -> None:
        """A collective failed: returns only if nobody is found missing in time.

        seconds: by default the limit, until which a rank may turn out to be silent.
        """
        self._failed_at = traceback
        wait = self._limit + 2 * self._interval if seconds is None else seconds
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and not self._over.is_set():
            self._look()
            for beat in self._seen.values():
                if beat.end is not None and beat.end != "done":
                    self._end_after(beat.end)
            time.sleep(min(self._interval, 0.05))
        self._failed_at = None

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self._note()
            self._say()
            self._look()
            self._tell_of_slow_ranks()

    def _note(self) -> None:
        """What this rank does now, and since when."""
        doing, plan_names = self.doing()
        here = self._lookout.look(plan_names, self._failed_at)
        signature = hash((doing, here.signature))
        if signature != self._signature:
            self._signature, self._moved = signature, time.monotonic()
        self._own.number += 1
        self._own.where = here.text + (f", {doing}" if doing else "")
        self._own.waits = here.waits
        self._own.still_seconds = time.monotonic() - self._moved

    def _say(self) -> bool:
        """Whether the store took it."""

        def tell(store: Store) -> bool:
            store.set(str(self._rank), self._own.encode())  # as it is now: two threads say it
            return True

        return bool(self._line.ask(tell))

    def _read(self) -> None:
        """The others' signs, where the store answers."""
        watched = self._watched()
        keys = [str(rank) for rank in watched]
        contents = self._line.ask(lambda store: store.multi_get(keys))
        if contents is None:
            return
        now = self._answered = time.monotonic()
        for rank, beat in zip(watched, map(Beat.decode, contents), strict=True):
            known = self._seen.get(rank)
            if known is None or known.number != beat.number:
                self._since[rank] = now
            self._seen[rank] = beat
            self._own.heard |= rank == 0 and beat.end is not None

    def _watched(self) -> list[int]:
        if self._world <= ALL_WATCHED:
            return [rank for rank in range(self._world) if rank != self._rank]
        return [(self._rank + 1) % self._world]

    def _all_ended(self, *, or_heard: bool) -> bool:
        self._read()
        return all(
            beat.end or (or_heard and beat.heard) or state_here(beat) == "ended"
            for beat in self._seen.values()
        )

    def _look(self) -> None:
        """Ends this process if another rank is missing."""
        gone = {rank for rank, beat in self._seen.items() if state_here(beat) == "ended"}
        if not self._store_has_gone():
            self._read()  # what they said at their end
        missing = []
        for rank, beat in self._seen.items():
            if beat.end == "done":
                continue
            if beat.end is not None:
                if time.monotonic() - self._since[rank] > SECONDS_TO_END:
                    self._end_after(beat.end)
                continue
            if rank in gone and self._store_failed():
                continue  # it follows the first rank, and cannot say so
            how = "its process has ended" if rank in gone else self._silence(rank, beat)
            if how is not None:
                missing.append(self._sentence(beat, how))
        if missing and not self._over.is_set():
            self._end(missing)

    def _silence(self, rank: int, beat: Beat) -> str | None:
        """Why a rank counts as missing though its process is not known to have ended."""
        now, state = time.monotonic(), state_here(beat)
        if state == "ended":
            return None  # since this look began: the next one asks first what it said
        if state == "stopped":
            stopped = now - self._stopped.setdefault(rank, now)
            return f"stopped for {stopped:.0f} s" if stopped > self._limit else None
        self._stopped.pop(rank, None)
        # No sign of others comes while the store does not answer: that is the first rank's silence.
        silent = (now if rank == 0 else self._answered) - self._since[rank]
        return f"silent for {silent:.0f} s" if silent > self._limit else None

    def _store_has_gone(self) -> bool:
        """With the process that it was in, as far as can be seen from here."""
        first = self._seen.get(0)
        return served_by_a_rank() and first is not None and state_here(first) == "ended"

    def _store_failed(self) -> bool:
        """Whether it has gone with a first rank that told of an error."""
        return self._store_has_gone() and self._seen[0].end not in (None, "done")

    def _sentence(self, beat: Beat, how: str) -> str:
        host = beat.machine.split()[0]
        return (
            f"rank {beat.rank} of {self._world} is missing: {how} (process {beat.process} on "
            f"{host}, last seen in {beat.where})"
        )

    def _end(self, missing: list[str]) -> None:
        """One of those who are left speaks; all end."""
        with self._ends:
            speaks = self._first_to_say("missing")
            self._note()
            line = (
                f"{'; '.join(missing)}, while rank {self._rank} was in {self._own.where}: {REMEDY}"
            )
            if speaks:
                say_error(line, rank=self._rank)
            time.sleep(self._seconds_for_others())
            leave(EXIT_CODE)

    def _seconds_for_others(self) -> float:
        """How long to stay after the line.

        torchrun ends all when the first has gone, so that the line must be out; and others that
        cannot reach the store must see, when they come to it, who of them speaks.
        """
        if self._store_has_gone():
            return max(1.0, 2 * self._interval)
        if self._answered > time.monotonic() - 1:
            return 0.2
        return self._answer_seconds + 2 * self._interval

    def _end_after(self, how: str) -> None:
        with self._ends:
            os.write(2, f"> paradyse: rank {self._rank} ends, for {how}\n".encode())
            self._tell_end(how)  # or those who still wait would take this rank for missing
            leave(EXIT_CODE)

    def _first_to_say(self, what: str) -> bool:
        said = None
        if not self._store_has_gone():
            said = self._line.ask(lambda store: store.add(what, 1))
        if said is not None:
            return said == 1
        alive = (r for r, beat in self._seen.items() if state_here(beat) in (None, "runs"))
        return all(self._rank < rank for rank in alive)

    def _tell_of_slow_ranks(self) -> None:
        """Once each time that this rank has waited for half the limit in one collective."""
        if not self._own.waits or self._own.still_seconds < self._limit / 2:
            self._told = False
            return
        slow = [
            f"rank {rank}, which is in {beat.where}"
            for rank, beat in sorted(self._seen.items())
            if not beat.waits and beat.end is None
        ]
        if self._told or not slow:
            return
        self._told = True
        if self._first_to_say(f"slow {self._own.where}"):
            seconds, where = self._own.still_seconds, self._own.where
            line = f"rank {self._rank} has waited {seconds:.0f} s in {where} for {'; '.join(slow)}"
            os.write(2, f"> paradyse: {line}\n".encode())
