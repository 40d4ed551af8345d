"""The first record of a trace: what runs, on what, by which costs, within which memory."""

from __future__ import annotations

import dataclasses
import datetime
import math
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args

from megatron_paradyse import __version__
from megatron_paradyse.planner.pipeline import UNLIMITED
from megatron_paradyse.settings import Settings
from megatron_paradyse.train.choosing import CostPolicies
from megatron_paradyse.train.describe import hardware, model_shape
from megatron_paradyse.train.model_layers import count_layers
from megatron_paradyse.units import parse_bytes


def run_record(settings: Settings, policies: CostPolicies | None) -> dict[str, Any]:
    """The values of the record; policies: those by cost, None where the policy is another.

    Process groups and the model must exist.
    """
    args = get_args()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "policy": settings.policy,
        "strategies": None if policies is None else list(policies.costs.strategies),
        "costs": None if policies is None else _costs(policies),
        "memory_budget_bytes": _budget_bytes(settings, policies),
        "memory_margin": settings.memory_margin,
        "stages": []
        if policies is None
        else [dataclasses.asdict(stage) for stage, _ in policies.made],
        "wide_bytes_per_second": _wide_rate(policies),
        "ranks": {
            "world": torch.distributed.get_world_size(),
            "tensor": mpu.get_tensor_model_parallel_world_size(),
            "pipeline": mpu.get_pipeline_model_parallel_world_size(),
            "data": mpu.get_data_parallel_world_size(),
        },
        "place": {
            "pipeline": mpu.get_pipeline_model_parallel_rank(),
            "data": mpu.get_data_parallel_rank(),
        },
        "hardware": dataclasses.asdict(hardware()),
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "model": dataclasses.asdict(model_shape(args, count_layers(args))),
    }


def _budget_bytes(settings: Settings, policies: CostPolicies | None) -> int | None:
    """What plans must keep to, or else what is enforced; None where there is no limit."""
    if policies is not None:
        return None if policies.budget_bytes == UNLIMITED else policies.budget_bytes
    return None if settings.memory_budget is None else parse_bytes(settings.memory_budget)


def _wide_rate(policies: CostPolicies | None) -> float | None:
    """At which a rank sends to other replicas; None where no rows go over several."""
    rate = math.inf if policies is None else policies.wide_bytes_per_second
    return rate if math.isfinite(rate) else None


def _costs(policies: CostPolicies) -> dict[str, str]:
    description = policies.costs.file.table.description
    return {
        "path": policies.costs.file.path,
        "fingerprint": policies.costs.file.fingerprint,
        "source": description.source,
        "hardware": description.hardware.name,
        "date": description.date,
    }
