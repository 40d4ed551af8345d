"""A rank whose job is told to end: signalled <Megatron flags>; all its processes get SIGTERM.

After the second iteration, from elsewhere: workers of a loader end well by a parent's.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time

from megatron_paradyse.train import plugin


def main() -> None:
    plugin.install()
    from megatron.training import training

    train_step = training.train_step

    def step_and_signal(*args, iteration, **kwargs):
        result = train_step(*args, iteration=iteration, **kwargs)
        if iteration == 1:
            workers = [process.pid for process in multiprocessing.active_children()]
            subprocess.run(["kill", "-TERM", *map(str, [*workers, os.getpid()])], check=True)
            time.sleep(1)
        return result

    training.train_step = step_and_signal
    sys.argv[0] = "pretrain"
    from megatron_paradyse.train.gpt import pretrain

    pretrain()
