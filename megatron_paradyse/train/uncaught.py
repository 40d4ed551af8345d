"""What a rank says of an error that nothing caught: one line where it is known, and who says it."""

from __future__ import annotations

import os
import sys
import time

from megatron_paradyse.errors import UserError, say_error
from megatron_paradyse.train.ending import (
    current_watchdog,
    is_lost_peer,
    is_out_of_memory,
    leave,
    words_of,
)

SECONDS_TO_BE_ENDED = 20
SECONDS_FOR_RANK_0 = 5

# In a training step the log says which plan ran out of memory, and what to do.
OUTSIDE_A_STEP = " (not in a training step): give more memory or a smaller model, or use more ranks"


def show_user_errors_in_one_line() -> None:
    """From now on an uncaught UserError is one line on stderr and exit code 2, Ctrl-C a line too.

    A rank that only lost its peer, because that one ended with an error, gives torchrun time to end
    it before it says anything, so that the cause is not buried.
    """
    show_traceback = sys.excepthook

    def hook(kind, error, traceback):
        dog = current_watchdog()
        known = isinstance(error, UserError) or is_out_of_memory(error)
        said_by, words = int(os.environ.get("RANK", 0)), words_of(error)
        if known and not isinstance(error, UserError):
            words += OUTSIDE_A_STEP
        if known and dog is not None:
            said_by, words = dog.first_words(words)
        if dog is not None and not is_lost_peer(error):
            dog.failed(words_of(error) if known else f"{kind.__name__}: {error}")
        if "--paradyse-debug" in sys.argv:
            show_traceback(kind, error, traceback)
        elif known:
            sys.stdout.flush()
            report_once(said_by, words)
            leave(2)  # other ranks may wait in a collective: do not wait for them
        elif issubclass(kind, KeyboardInterrupt):  # of all ranks at once, by Ctrl-C
            if os.environ.get("RANK", "0") == "0":
                say_error("interrupted")
        else:
            if is_lost_peer(error):
                if dog is not None:
                    dog.lost_a_peer(traceback)
                time.sleep(SECONDS_TO_BE_ENDED)
            show_traceback(kind, error, traceback)

    sys.excepthook = hook


def report_once(said_by: int, message: str) -> None:
    """One line on stderr, once: rank 0 speaks for all, with the words of the first that failed.

    The others wait to be ended by torchrun, and speak for themselves if that does not happen: what
    is wrong may be wrong on their machine alone, or in their share of a microbatch.
    """
    import torch

    if os.environ.get("RANK", "0") != "0":
        together = not torch.distributed.is_initialized()
        time.sleep(SECONDS_TO_BE_ENDED if together else SECONDS_FOR_RANK_0)
    say_error(message, rank=said_by)
