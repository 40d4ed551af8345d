"""What a lookout sees of a training, and what it leaves alone."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from megatron_paradyse.train.whereabouts import Lookout, _as_frames, _described


def beside(look: Callable[[], Any]) -> list[Any]:
    """Looks from another thread at this one, which soon waits, until two of them are alike."""
    found: list[Any] = []

    def run() -> None:
        for _ in range(1000):
            try:
                found.append(look())
            except LookupError as error:
                found.append(error)
                return
            if len(found) > 1 and found[-1].signature == found[-2].signature:
                return

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


@pytest.fixture
def without_frames(monkeypatch):
    def refuse():
        raise LookupError

    monkeypatch.setattr(sys, "_current_frames", refuse)


def test_frames_are_taken_only_of_what_has_not_moved(without_frames):
    """A frame that is held keeps alive what its function lets go of."""
    *moving, still = beside(Lookout().look)
    assert moving and all("test_whereabouts" in here.text for here in moving)
    assert isinstance(still, LookupError)


def test_what_has_not_moved_has_the_same_signature():
    *_, moved, still = beside(Lookout().look)
    assert moved.signature == still.signature
    assert "beside" in still.text and not still.waits


def test_a_rank_that_waits_for_the_gradients_of_replicas_waits():
    """Megatron has them summed where its context manager ends, in no function of their names."""
    stack = [
        '  File "/x/torch/distributed/distributed_c10d.py", line 2 in _coalescing_manager',
        '  File "/usr/lib/python3.12/contextlib.py", line 144 in __exit__',
        '  File "/x/site-packages/megatron/core/buffer.py", line 702 in start_grad_sync',
    ]
    here = _described(_as_frames(stack), (), 0)
    assert here.waits and here.text == "several collectives of start_grad_sync (core/buffer.py:702)"


class Tensor:
    """Something whose end can be seen."""


def test_what_a_function_held_that_was_looked_at_ends_with_it():
    """And not when Python next collects cycles, which a training does rarely."""

    def microbatch() -> weakref.ref:
        activation = Tensor()
        *_, moved, still = beside(Lookout().look)
        assert moved.signature == still.signature
        return weakref.ref(activation)

    gc.collect()
    gc.disable()
    try:
        assert microbatch()() is None
    finally:
        gc.enable()
