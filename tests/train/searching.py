"""The search for costs at a start, of a run of one rank."""

from __future__ import annotations

import argparse
import sys

import torch

from megatron_paradyse.settings import Settings
from megatron_paradyse.train import auto_costs, cost_cache
from megatron_paradyse.train.model_kind import GPT


def search(folder, monkeypatch, **settings) -> auto_costs.Search:
    """Of a run of one rank, with a settings file."""
    monkeypatch.setenv("MEGATRON_PARADYSE_CACHE", str(folder))
    monkeypatch.setattr(cost_cache, "cost_key", lambda *_: "key")
    flags = ["--num-layers", "4", "--vocab-size", "9", "--paradyse-config", "settings.yaml"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *flags])
    args = argparse.Namespace(
        world_size=1,
        tensor_model_parallel_size=2,
        params_dtype=torch.bfloat16,
        seq_length=4096,
        micro_batch_size=1,
        paradyse_model=GPT,
        use_checkpoint_args=False,
    )
    return auto_costs.Search(args, Settings(**settings))
