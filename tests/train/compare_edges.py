"""A rank with two models of the same parameters: edges in tiles, and stock Megatron's.

compare_edges TOLERANCE <Megatron flags>
"""

from __future__ import annotations

import functools
import sys
from unittest.mock import patch

import torch

from tests.train.compare_plans import begin, build, gradients
from tests.train.comparing import relative_error

TILE = 24
LENGTHS = (24, 40, 52)  # the first, with b = 1, fits into one tile; the last of the others is odd
LOGGED = ("loss_values", "correct_values", "total_values")  # of more tokens predicted


def main() -> None:
    tolerance = float(sys.argv.pop(1))
    args = begin()
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training import initialize

    from megatron_paradyse.edges import cross_entropy
    from megatron_paradyse.model_edges import attach_edges

    models = {
        "stock": build(args),
        "tiles": build(args, functools.partial(attach_edges, head_tile=TILE)),
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
    errors = {key: relative_error(results["tiles"][key], x) for key, x in results["stock"].items()}
    worst = max(errors.values())
    if torch.distributed.get_rank() == 0:
        print(f"worst of {len(errors)}: {worst:.1e}", flush=True)
    assert worst <= tolerance, errors


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
