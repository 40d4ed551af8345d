"""Measurements that stand for several strategies."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_paradyse.costs.table import (
    ATTENTION,
    BYTES_ONLY,
    HEAD,
    LAYER,
    MLP,
    MODEL,
    OK,
    OOM,
    Measurement,
)
from megatron_paradyse.profiler.points import like_it, strategies_to_profile
from megatron_paradyse.strategies import PACKED_ONLY

NAMES = (*strategies_to_profile(None), *PACKED_ONLY)  # those have no costs of single documents


@pytest.mark.parametrize(
    ("strategy", "operation", "status", "switches", "names"),
    [
        ("ulysses_z", MLP, OK, True, ["megatron_cz", "colossal_z"]),
        ("megatron_cz", f"{MLP}@2", BYTES_ONLY, True, ["colossal_z"]),
        ("ulysses_z+recompute", MLP, OOM, True, ["megatron_cz+recompute", "colossal_z+recompute"]),
        ("ulysses_z", MLP, "unsupported: n % p", True, []),
        ("megatron_ts", MLP, "unsupported: g % p", False, []),
        ("ulysses_z", ATTENTION, OK, True, []),
        ("ulysses_z", LAYER, OK, True, []),
        ("megatron_ts", MLP, OK, True, []),
        ("megatron_ts", MLP, OK, False, ["ulysses_z", "megatron_cz", "colossal_z", "metp"]),
        ("metp", MLP, OK, True, []),
        (MODEL, HEAD, OK, True, []),
    ],
)
def test_what_strategies_share_is_measured_of_the_first(
    strategy, operation, status, switches, names
):
    numbers = {OK: (1.0, 2.0, 3.0), BYTES_ONLY: (0.0, 0.0, 3.0)}.get(status, ())
    measured = Measurement(strategy, operation, 64, 1, status, *numbers)
    found = like_it(measured, NAMES, switches=switches)
    assert found == [dataclasses.replace(measured, strategy=name) for name in names]
