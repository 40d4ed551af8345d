"""A real rank: real_rank OUTPUT LENGTH TILE <Megatron flags>, bytes of every operation as JSON.

TILE: rows above which a sequence is long.

Runs each operation once, as a profile does, and times nothing. Tokens go to experts in turns.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch


def route_in_turns() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    gating = TopKRouter.gating

    def in_turns(self, x):
        logits = gating(self, x)
        rows = logits.data.flatten(0, -2)
        for row in range(len(rows)):
            rows[row] = torch.arange(rows.shape[1]).roll(row * self.topk)
        return logits

    TopKRouter.gating = in_turns


def main() -> None:
    output, length, tile_rows = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    from megatron.training import get_args, training
    from megatron.training.arguments import parse_and_validate_args

    from megatron_paradyse.live_bytes import make_meter
    from megatron_paradyse.profiler.measure import measure_bytes
    from megatron_paradyse.profiler.model import build_layers, grow_gather_buffer
    from megatron_paradyse.profiler.operations import Operations
    from megatron_paradyse.profiler.run import strategies_to_profile
    from megatron_paradyse.strategies import sizes
    from megatron_paradyse.train.model_layers import ModelLayers, count_layers

    sizes.TILE_ROWS = tile_rows
    sys.argv = ["profile", *sys.argv[4:]]
    parse_and_validate_args()
    training.initialize_megatron()
    get_args().check_for_nan_in_loss_and_grad = False
    route_in_turns()
    meter = make_meter()
    with meter:
        layers = ModelLayers.of_arguments(get_args(), count_layers(get_args()))
        kinds = layers.kinds()
        model = build_layers(layers.only(tuple(kinds.first_layers.values()), predicting=True))
        grow_gather_buffer(model, length)
        operations = Operations(model, length, 1)
    names = [("model", "embedding"), ("model", "head")]
    names += [("model", "prediction")] if layers.num_predicting else []
    names += [(s, o) for s in strategies_to_profile(None) for o in kinds.measured()]
    found = []
    # METP keeps which rows its whole heads have, once for all layers: made before it is measured.
    for operation in kinds.measured():
        measure_bytes(operations.get(operation, "metp"), meter)
    for strategy, operation in names:
        measured, _ = measure_bytes(operations.get(operation, strategy), meter)
        found.append((strategy, operation, dataclasses.asdict(measured)))
    if os.environ["RANK"] == "0":
        output.write_text(json.dumps(found))
