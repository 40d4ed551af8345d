"""A rank with two models of the same parameters: edges in tiles, and stock Megatron's.

compare_edges TOLERANCE <Megatron flags>
"""

from __future__ import annotations

import functools
import sys
from unittest.mock import patch

import torch

from megatron_paradyse.train import plugin
from tests.train.compare_plans import gradients

TILE = 24
LENGTHS = (
    24,
    40,
    52,
)  # of the first, b = 1: fits into one tile; the last tile of the others is odd


LOGGED = ("loss_values", "correct_values", "total_values")  # of more tokens predicted


def main() -> None:
    tolerance = float(sys.argv.pop(1))
    plugin.install()
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.utils import get_model_config
    from megatron.training import initialize, training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_paradyse.edges import cross_entropy
    from megatron_paradyse.model_edges import attach_edges

    args = parse_and_validate_args()
    training.initialize_megatron()
    args.check_for_nan_in_loss_and_grad = False  # its check wants to run inside train_step

    def build(*hooks):
        container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        container.model.pre_wrap_hooks += hooks
        model, _, _ = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=container,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
        return model

    models = {
        "stock": build(),
        "tiles": build(functools.partial(attach_edges, head_tile=TILE)),
    }
    pairs = zip(models["stock"][0].parameters(), models["tiles"][0].parameters(), strict=True)
    for theirs, mine in pairs:
        mine.data.copy_(theirs.data)
    assert models["stock"][0].state_dict().keys() == models["tiles"][0].state_dict().keys()
    batches = _batches(args)
    results = {}
    for name, model in models.items():
        initialize._set_random_seed(args.seed)
        with patch.object(cross_entropy, "_run_tiles", wraps=cross_entropy._run_tiles) as run_tiles:
            results[name] = gradients(args, model, batches)
        long = sum(
            batch["lengths"].numel() * (batch["tokens"].shape[1] - 1) > TILE for batch in batches
        )
        long *= 1 + (args.mtp_num_layers or 0)
        assert run_tiles.call_count == (long if name == "tiles" else 0), run_tiles.call_count
        results[name]["logits"] = _logits(model[0], batches[-1])
        tracker = MTPLossLoggingHelper.tracker
        logged = {key: value.clone() for key, value in tracker.items() if key in LOGGED}
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        results[name].update(logged)
    worst = max(_error(results["tiles"][key], true) for key, true in results["stock"].items())
    if torch.distributed.get_rank() == 0:
        print(f"worst of {len(results['stock'])}: {worst:.1e}", flush=True)
    assert worst <= tolerance, {
        key: _error(results["tiles"][key], true) for key, true in results["stock"].items()
    }


def _batches(args) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows, batches = args.micro_batch_size, []
    for length in LENGTHS:
        tokens = torch.randint(args.padded_vocab_size, (rows, length + 1), generator=generator)
        lengths = torch.tensor([length - 5 * i for i in range(rows)])
        batches.append({"tokens": tokens, "lengths": lengths})
    return batches


def _logits(model, batch) -> torch.Tensor:
    """Without labels, as inference and scoring call the model."""
    tokens = batch["tokens"][:, :-1].to(next(model.parameters()).device).contiguous()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    with torch.no_grad():
        return model(tokens, positions, None)


def _error(mine: torch.Tensor, true: torch.Tensor) -> float:
    return float((mine - true).double().norm() / true.double().norm())
