"""A rank of a model whose layers differ: layers_driver OUTPUT LENGTH <Megatron flags>, JSON.

What each built layer is, what the arguments say of it, the constants as a profile finds them and as
the whole model has them; and predicted and measured peaks of iterations and of evaluations.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from benchmarks.iterations import start_rank
from benchmarks.whole_model_rank import Check, plans_at
from megatron_paradyse.plan import uniform_plan

BASES = ("ulysses_z", "metp")


def main() -> None:
    output, length = Path(sys.argv[1]), int(sys.argv[2])
    sys.argv[1:] = sys.argv[3:]
    args = start_rank()
    from megatron_paradyse.live_bytes import make_meter
    from megatron_paradyse.profiler import model as profiled
    from megatron_paradyse.train.model_layers import ModelLayers, count_layers
    from megatron_paradyse.train.static_bytes import waiting_gradient_bytes

    num_layers = count_layers(args)
    layers = ModelLayers.of_arguments(args, num_layers)
    kinds, halves = layers.kinds(), layers.halves(args)
    meter = make_meter()
    model, constants = profiled.build_and_measure(num_layers, meter, longest_tokens=length)
    found = {
        "others": {name: list(numbers) for name, numbers in kinds.others.items()},
        "halves": halves,
        "profiled": [_what(model.layer_of(name)) for name in kinds.measured()],
        "static_bytes": constants.static_bytes - waiting_gradient_bytes(model.chunks[0]),
        "optimizer_bytes": constants.optimizer_bytes,
    }
    del model
    gc.collect()
    model, before, static_bytes = profiled.build_under(meter, layers)
    buffer = length * args.hidden_size * args.params_dtype.itemsize
    found["whole_bytes"] = static_bytes + buffer
    found["layers"] = [_what(layer) for layer in model.gpt.decoder.layers]
    if args.mtp_num_layers:
        found["layers"] += [_what(layer.mtp_model_layer) for layer in model.gpt.mtp.layers]
    check = Check(model, meter, before - buffer, constants)
    found["peaks"] = check.compare_bytes(length, plans_at(1, num_layers, 4))
    recomputing = [uniform_plan(range(1, num_layers + 1), f"{name}+recompute") for name in BASES]
    found["waiting_bytes"] = waiting_gradient_bytes(model.chunks[0])
    found["evaluations"] = check.compare_evaluations(length, recomputing)
    if os.environ["RANK"] == "0":
        output.write_text(json.dumps(found))


def _what(layer) -> list:
    """Of the built module: its MLP's class, its window, whether it leaves the rotation out."""
    from megatron_paradyse.shapes import attention_shape

    shape = attention_shape(layer.self_attention, training=True)
    freq = layer.config.no_rope_freq
    unrotated = bool(freq) and bool(freq[layer.layer_number - 1])
    return [type(layer.mlp).__name__, shape.window, unrotated]
