"""A rank of benchmarks/reliability.py: trains, and does what its fault says when its time comes.

    reliability_rank SPEC.json <Megatron flags>

SPEC: {"fault": name, "rank": who, "iteration": when, "delay": seconds, "losses": file, ...}. The
last rank appends "iteration loss" to the file, in full precision.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_paradyse.train import plugin, uncaught

Spec = dict


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    sys.argv = ["pretrain", *sys.argv[2:]]
    plugin.install()
    # No torchrun ends the others here.
    uncaught.SECONDS_TO_BE_ENDED, uncaught.SECONDS_FOR_RANK_0 = 2, 1
    record_losses(spec["losses"])
    mine = spec["rank"] in (int(os.environ["RANK"]), "all")
    if mine and spec["fault"] in FAULTS:
        FAULTS[spec["fault"]](spec)
    if "profile" in spec:
        profiles(spec["profile"])
        return
    from megatron_paradyse.train.gpt import pretrain

    pretrain()


def profiles(values: dict) -> None:
    """Measure instead of training; a fault may come at any point of it."""
    from megatron_paradyse.profiler.points import Options
    from megatron_paradyse.profiler.run import profile

    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    profile(Options(**values), sys.argv[1:], lambda event: None)


def kill_later(spec: Spec) -> None:
    from megatron_paradyse.profiler.runner import Runner

    original = Runner.run
    armed: list[bool] = []

    @functools.wraps(original)
    def run(self, point):
        if not armed:
            armed.append(True)
            later(spec, signal.SIGKILL)
        return original(self, point)

    Runner.run = run  # type: ignore[method-assign]


def record_losses(path: str) -> None:
    from megatron.training import training

    original = training.training_log

    @functools.wraps(original)
    def training_log(*args, **kwargs):
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            with open(path, "a") as file:
                file.write(f"{args[3]} {float(args[0]['lm loss'])!r}\n")
        return original(*args, **kwargs)

    training.training_log = training_log


def later(spec: Spec, number: int) -> None:
    """The signal to this process after the spec's delay, whatever it does then."""
    timer = threading.Timer(spec["delay"], os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def signalled(where: str, number: int) -> Callable[[Spec], None]:
    """Arms a signal that comes in a phase of an iteration: forward, backward or save."""

    def arm(spec: Spec) -> None:
        def begin() -> None:
            later(spec, number)

        around(where, spec["iteration"], begin)

    return arm


def around(where: str, iteration: int, act: Callable[[], None]) -> None:
    """Call act once, when the phase of that iteration begins."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import get_args, training

    module, name = {
        "forward": (schedules, "forward_step"),
        "backward": (schedules, "backward_step"),
        "save": (training, "save_checkpoint"),
        "step": (training, "train_step"),
    }[where]
    original = getattr(module, name)
    done: list[int] = []

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        now = args[0] if where == "save" else (getattr(get_args(), "curr_iteration", 0) or 0) + 1
        if now >= iteration and not done:
            done.append(now)
            act()
        return original(*args, **kwargs)

    setattr(module, name, wrapped)


def slow(spec: Spec) -> None:
    around("step", spec["iteration"], functools.partial(time.sleep, spec["delay"]))


def not_a_number(spec: Spec) -> None:
    """What the layers give on this rank becomes NaN."""
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.training import get_args

    original = TransformerBlock.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        hidden = original(self, *args, **kwargs)
        now = (getattr(get_args(), "curr_iteration", 0) or 0) + 1
        return hidden * float("nan") if now >= spec["iteration"] else hidden

    TransformerBlock.forward = forward


def full_disk(spec: Spec) -> None:
    """No file of this process, or of its helpers, grows beyond spec["bytes"], from a save on."""

    def limit() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (spec["bytes"], hard))

    around("save", spec["iteration"], limit)


def replace_file(spec: Spec) -> None:
    """Something else comes to be at spec["path"], or nothing."""

    def act() -> None:
        path = Path(spec["path"])
        if spec["content"] is None:
            path.unlink()
            return
        new = path.with_name(f"{path.name}.new")
        new.write_text(spec["content"])
        os.replace(new, path)

    around("step", spec["iteration"], act)


def other_flags(spec: Spec) -> None:
    sys.argv += spec["flags"]


def other_code(spec: Spec) -> None:
    from megatron_paradyse.train import agreement

    agreement.sources = lambda: {Path("other.py"): b""}  # type: ignore[assignment]


def other_plans(spec: Spec) -> None:
    """What a bug could do: this rank plans otherwise than the flags say, from an iteration on."""
    from megatron.training import get_args

    from megatron_paradyse.plan import uniform_plan
    from megatron_paradyse.policy import PlanFilePolicy

    original = PlanFilePolicy.plan

    def plan(self, batch_size, seq_length, layer_numbers, **more):
        if (getattr(get_args(), "curr_iteration", 0) or 0) + 1 >= spec["iteration"]:
            return uniform_plan(tuple(layer_numbers), "metp")
        return original(self, batch_size, seq_length, layer_numbers, **more)

    PlanFilePolicy.plan = plan  # type: ignore[method-assign]


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS: dict[str, Callable[[Spec], None]] = {
    "kill in forward": signalled("forward", KILL),
    "kill in backward": signalled("backward", KILL),
    "kill in save": signalled("save", KILL),
    "kill of all ranks": signalled("step", KILL),
    "kill of all ranks in save": signalled("save", KILL),
    "stop in forward": signalled("forward", STOP),
    "stop in backward": signalled("backward", STOP),
    "stop in save": signalled("save", STOP),
    "kill in profile": kill_later,
    "slow rank": slow,
    "NaN loss": not_a_number,
    "full disk in save": full_disk,
    "cost file replaced while running": replace_file,
    "data file vanished while running": replace_file,
    "other flags on a rank": other_flags,
    "other cost file on a rank": other_flags,
    "other code on a rank": other_code,
    "other plans on a rank": other_plans,
}


if __name__ == "__main__":
    main()
