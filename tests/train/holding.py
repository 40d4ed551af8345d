"""A rank that trains, and tells what it was said to hold, and of each iteration what it held at
most and at its end, with evaluations as the one after it begins.

holding OUTPUT <Megatron flags>: OUTPUT-RANK.json gets {"told": bytes, "parameters": bytes,
"held": [bytes, ...], "peaks": [bytes, ...]}
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from megatron_paradyse.train import plugin


def main() -> None:
    output = Path(f"{sys.argv.pop(1)}-{os.environ['RANK']}.json")
    plugin.install()
    from megatron.core.parallel_state import get_global_memory_buffer
    from megatron.training import get_args, training

    from megatron_paradyse.train import session
    from megatron_paradyse.train.gpt import pretrain

    count, step, evaluate = session.static_bytes, training.train_step, training.evaluate
    found: dict = {"held": [], "peaks": []}
    meters = []

    def static_bytes(chunks, optimizer, meter, **how):
        meters.append(meter)
        found["told"] = count(chunks, optimizer, meter, **how)
        found["parameters"] = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
        output.write_text(json.dumps(found))
        return found["told"]

    def train_step(*args, **kwargs):
        meters[0].reset_peak()
        result = step(*args, **kwargs)
        found["peaks"].append(meters[0].peak_bytes)
        if not get_args().eval_iters:
            note_held()
        return result

    def evaluate_noting(*args, **kwargs):
        if len(found["held"]) < len(found["peaks"]):  # the last iteration is followed by more
            note_held()
        return evaluate(*args, **kwargs)

    def note_held():
        get_global_memory_buffer().buffer.clear()  # plans count it themselves
        gc.collect()
        found["held"].append(meters[0].live_bytes)
        output.write_text(json.dumps(found))

    session.static_bytes, training.train_step = static_bytes, train_step
    training.evaluate = evaluate_noting
    pretrain()
