"""One rank of benchmarks/overhead.py."""

from __future__ import annotations

import functools
import json
import os
import statistics
import time

from benchmarks.iterations import end_rank, say
from megatron_paradyse.train import plugin


def main() -> None:
    task = json.loads(os.environ["OVERHEAD"])
    plugin.install()
    from megatron.training import training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_paradyse.hook import attach_hooks
    from megatron_paradyse.policy import make_policy
    from megatron_paradyse.train.loop_counts import loop_counts

    args = parse_and_validate_args()
    training.initialize_megatron()
    ours = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    policy = make_policy(args.paradyse_settings)
    ours.model.pre_wrap_hooks.append(
        functools.partial(attach_hooks, policy_of=lambda _: policy, counts=loop_counts)
    )
    stock = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    stock.model.transformer_layer_spec = _stock_spec
    sides = {"ours": _setup(training, ours), "stock": _setup(training, stock)}
    rows = []
    for length, pairs in task["lengths"].items():
        seconds = _measure(args, sides, int(length), pairs)
        ratios = [o / s for o, s in zip(seconds["ours"], seconds["stock"], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "s": int(length),
                "pairs": pairs,
                "ratio_median": statistics.median(ratios),
                "ratio_quartiles": [quartiles[0], quartiles[2]],
                "ours_seconds": statistics.median(seconds["ours"]),
                "stock_seconds": statistics.median(seconds["stock"]),
            }
        )
        say(json.dumps(rows[-1]))
    end_rank(task["output"], rows)


def _stock_spec(config, vp_stage=None):
    """Megatron's own layer spec; only the attention kernel is ours, as in the model beside it."""
    from megatron.training.models.gpt import default_layer_spec

    from megatron_paradyse.core_attention import CoreAttention

    spec = default_layer_spec(config, vp_stage)
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    return spec


def _setup(training, config):
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config

    model, optimizer, scheduler = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        cfg_container=config,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
    return model, optimizer, scheduler


def _measure(args, sides, length: int, pairs: int) -> dict[str, list[float]]:
    """Seconds per iteration of both sides, in turns; who begins alternates."""
    seconds: dict[str, list[float]] = {"ours": [], "stock": []}
    args.seq_length = length
    for pair in range(-2, pairs):  # the first two warm up
        for name in ("ours", "stock") if pair % 2 else ("stock", "ours"):
            elapsed = _iteration(args, name, sides[name], length)
            if pair >= 0:
                seconds[name].append(elapsed)
    return seconds


def _iteration(args, name: str, side, length: int) -> float:
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config
    from megatron.training import training

    from megatron_paradyse.train.gpt import forward_step

    model, optimizer, scheduler = side
    args.paradyse = name == "ours"
    data = _batches(args, name, length)
    torch.distributed.barrier()
    start = time.perf_counter()
    training.train_step(
        forward_step,
        data,
        model,
        optimizer,
        scheduler,
        get_model_config(model[0]),
        get_forward_backward_func(),
        iteration=0,
    )
    torch.distributed.barrier()
    return time.perf_counter() - start


def _batches(args, name: str, length: int):
    """The same tokens, in the form of each side's data path."""
    import torch
    from megatron.core.rerun_state_machine import RerunDataIterator

    generator = torch.Generator().manual_seed(length)
    batches = []
    for _ in range(2):
        text = torch.randint(args.padded_vocab_size, (1, length + 1), generator=generator)
        if name == "ours":
            batches.append({"tokens": text, "lengths": torch.tensor([length])})
        else:
            batches.append(
                {
                    "tokens": text[:, :-1].contiguous(),
                    "labels": text[:, 1:].contiguous(),
                    "loss_mask": torch.ones(1, length),
                    "position_ids": torch.arange(length)[None].contiguous(),
                }
            )
    return RerunDataIterator(iter(batches))


if __name__ == "__main__":
    main()
