"""What a rank is doing, read from the stacks of its threads: nothing is noted while it trains.

Whoever holds a frame of another thread keeps alive what that one lets go of. So a training that
moves is read from printed stacks (faulthandler prints them and holds nothing), which do not tell
layers; frames are looked at only where nothing has moved since.
"""

from __future__ import annotations

import faulthandler
import re
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import walk_tb
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any

from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]

from megatron_paradyse.strategies import BUILT_IN, base_name

DISTRIBUTED = "torch/distributed/distributed_c10d.py"
BACKWARD = "torch/autograd/graph.py"
PASSED_OVER = ("cpu_platform.py", "helper_processes.py", "/signal.py", "/threading.py")
OWN_COLLECTIVES = ("strategies/collectives.py", "strategies/transport.py")
COLLECTIVES = re.compile(
    r"all_(reduce|gather|to_all)\w*|(reduce|broadcast|gather|scatter)\w*|\w*barrier|i?send|i?recv|"
    r"batch_isend_irecv|(ring_)?exchange|_coalescing_manager|wait"
)
SEVERAL = "_coalescing_manager"  # at whose end those of the gradients of replicas run
# Files of strategies that several share, and whose backward says no more.
SHARED_FILES = {
    "ring": ("megatron_cz", "colossal_z"),
    "ring_attention": ("megatron_cz", "colossal_z", "megatron_ts", "ulysses_z"),
    "metp_attention": ("metp",),
    "metp_mlp": ("metp",),
    "weight_blocks": ("metp",),
    "zero": ("ulysses_z", "megatron_cz", "colossal_z"),
    **{name: (name,) for name in BUILT_IN},
}
MOST_FRAMES = 200


@dataclass(frozen=True)
class Whereabouts:
    """text: for a person. signature: the same as long as nothing moves. waits: in a collective."""

    text: str
    signature: int
    waits: bool


PRINTED = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Lookout:
    """Looks at this process, again and again."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the process looks
        self._last = 0

    def look(
        self, plan_names: tuple[str, ...] = (), traceback: TracebackType | None = None
    ) -> Whereabouts:
        """Where the training is, or where an error of it was raised.

        plan_names: strategies of the current plan, where a stack leaves open which one runs.
        """
        if traceback is not None:
            stack = _frames_of(traceback)
            return _described(stack, plan_names, _signature(stack))
        stack = _printed_stack(self._printed())
        signature = _signature(stack)
        moved, self._last = signature != self._last, signature
        return _described(stack if moved else _training_stack(), plan_names, signature)

    def _printed(self) -> str:
        """The stacks of all threads but this one."""
        self._file.seek(0)
        self._file.truncate()
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._file.seek(0)
        threads = self._file.read().decode(errors="replace").split("\n\n")
        return "\n\n".join(thread for thread in threads if not thread.startswith("Current"))


def _printed_stack(printed: str) -> list[Any]:
    """Innermost first, as _training_stack, of frames without locals."""
    threads = [part.splitlines() for part in printed.split("\n\n") if part.startswith("Thread")]
    main_thread = f"{threading.main_thread().ident or 0:016x}"
    main = [line for lines in threads if main_thread in lines[0] for line in lines[1:]]
    others = [line for lines in threads if main_thread not in lines[0] for line in lines[1:]]
    found = _as_frames(main)
    if found and found[0].f_code.co_filename.endswith(BACKWARD):
        autograd = _as_frames(others)
        if any("/strategies/" in _file(f) or _file(f).endswith(DISTRIBUTED) for f in autograd):
            return autograd + found
    return found


def _as_frames(lines: Sequence[str]) -> list[Any]:
    frames = []
    for file, line, name in (m.groups() for m in map(PRINTED.match, lines) if m):
        code = SimpleNamespace(co_filename=file, co_name=name, co_qualname=name)
        frames.append(SimpleNamespace(f_code=code, f_lineno=int(line), f_locals={}))
    return frames[:MOST_FRAMES]


def _signature(stack: Sequence[Any]) -> int:
    """Of the training's own stack alone: the threads of loaders move for themselves."""
    return hash(tuple((_file(f), f.f_lineno, f.f_code.co_name) for f in stack))


def _described(stack: list[Any], plan_names: tuple[str, ...], signature: int) -> Whereabouts:
    collective = _collective(stack)
    place = _strategy(stack, plan_names) or _place(stack)
    if any(f.f_code.co_filename.endswith(BACKWARD) for f in stack):
        place += ", backward"
    phase = _phase(stack)
    if phase:
        place += f", {phase}"
    text = f"{collective} of {place}" if collective else place
    return Whereabouts(text, signature, bool(collective))


def _training_stack() -> list[FrameType]:
    """Innermost first: of the main thread, and of autograd's where that one runs a backward.

    For another thread to call: a caller's own frame among its locals would keep them all, and the
    training's tensors with them, until Python collects cycles.
    """
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    main_thread = threading.main_thread().ident or 0
    main = _frames(frames.get(main_thread))
    if not main or not main[0].f_code.co_filename.endswith(BACKWARD):
        return main
    del frames[main_thread]
    for frame in frames.values():
        stack = _frames(frame)
        if any("/strategies/" in _file(f) or _file(f).endswith(DISTRIBUTED) for f in stack):
            return stack + main
    return main


def _frames(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < MOST_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found


def _frames_of(traceback: TracebackType) -> list[FrameType]:
    found = [frame for frame, _ in walk_tb(traceback)]
    return found[::-1][:MOST_FRAMES]


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")


def _collective(stack: list[FrameType]) -> str | None:
    """The name of the collective that the innermost frames are in."""
    found = None
    for frame in stack[:12]:
        file, name = _file(frame), frame.f_code.co_name
        inside = file.endswith(DISTRIBUTED) or file.endswith(OWN_COLLECTIVES)
        if inside and COLLECTIVES.fullmatch(name):
            if found is None or found == "wait":
                found = _operation(frame) if name == "wait" else name
                found = "several collectives" if found == SEVERAL else found
        elif found is not None and not inside:
            break
    return found


def _operation(frame: FrameType) -> str:
    """What a Pending waits for."""
    works = getattr(frame.f_locals.get("self"), "_works", None)
    kind = getattr(works[0], "_get_op_type", None) if works else None
    try:
        name = OpType(kind()).name if kind else "wait"
    except (RuntimeError, TypeError, ValueError):
        return "wait"
    return name.lower().replace("_base", "").strip("_")


def _strategy(stack: list[FrameType], plan_names: tuple[str, ...]) -> str | None:
    """The strategy whose code runs; its operation and layer where the stack tells."""
    shared: tuple[str, ...] = ()
    for frame in stack:
        name, file = frame.f_code.co_qualname, _file(frame)
        module = frame.f_locals.get("self") if name.startswith("Switchable") else None
        if name in ("SwitchableSelfAttention.forward", "SwitchableLatentAttention.forward"):
            strategy = frame.f_locals.get("strategy", "megatron_ts")
            return f"{strategy}'s attention, layer {getattr(module, 'plan_number', '?')}"
        if name == "SwitchableMLP.forward":
            return f"{getattr(module, 'strategy', '?')}'s MLP"
        if not shared and "megatron_paradyse/strategies/" in file:
            shared = SHARED_FILES.get(file.rsplit("/", 1)[-1].removesuffix(".py"), ())
        if not shared and "megatron/core/tensor_parallel/" in file:
            shared = ("megatron_ts",)
    if not shared and any(_file(frame).endswith(OWN_COLLECTIVES) for frame in stack):
        shared = tuple(sorted({base_name(name) for name in plan_names}))
    planned = [name for name in shared if name in {base_name(name) for name in plan_names}]
    return " or ".join(planned or shared) or None


def _place(stack: list[FrameType]) -> str:
    """The innermost function that is not of torch or of the standard library."""
    for frame in stack:
        file = _file(frame)
        own = "/site-packages/" in file or "/lib/python" not in file
        if (
            own
            and not file.endswith(PASSED_OVER)
            and not file.startswith("<")
            and "/torch/" not in file
        ):
            name, line = frame.f_code.co_name, frame.f_lineno
            return f"{name} ({'/'.join(file.rsplit('/', 2)[-2:])}:{line})"
    return stack[0].f_code.co_name if stack else "nothing"


def _phase(stack: list[FrameType]) -> str | None:
    names = {frame.f_code.co_name for frame in stack}
    known = {"save_checkpoint": "saving", "load_checkpoint": "loading", "evaluate": "evaluating"}
    return next((text for name, text in known.items() if name in names), None)
