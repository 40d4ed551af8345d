"""A cost file for the tests' model, from invented laws.

Seconds are invented; bytes are far above what the model really takes, so that a budget that binds
the plans is never reached by the training itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from megatron_paradyse.costs.cost_file import write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.table import Constants, CostTable, Measurement
from tests.costs.synthetic import DESCRIPTION

LENGTHS = (16, 32, 64, 96, 128, 192, 256)
# overhead and seconds per token; kept and workspace bytes per token
LAWS = {
    "megatron_ts": (1e-3, 1.0e-4, 50_000, 75_000),
    "ulysses_z": (5e-3, 6.0e-5, 52_000, 38_000),
    "metp": (8e-3, 9.0e-5, 12_000, 12_000),
    "metp+recompute": (12e-3, 1.2e-4, 3_000, 20_000),
}


def write_costs(
    path: Path,
    *,
    scale_bytes: float = 1.0,
    scale_seconds: float = 1.0,
    static_bytes: float = 1e8,
    host_bytes_per_second: float | None = None,
    kind: str = "cpu",
    num_predicting: int = 0,
) -> Path:
    """scale_bytes and scale_seconds multiply all that the layers of a microbatch take.

    host_bytes_per_second: None, as in files of earlier versions; kind: of the device;
    num_predicting: layers of multi-token prediction besides.
    """
    measurements = []
    for s in LENGTHS:
        for name, (overhead, per_token, kept, workspace) in LAWS.items():
            seconds = scale_seconds * (overhead + per_token * s)
            kept_bytes = kept * s * scale_bytes
            bytes_ = (kept_bytes, workspace * s * scale_bytes / 2, workspace * s * scale_bytes)
            for operation in ("attention", "mlp"):
                measurements.append(
                    Measurement(name, operation, s, 1, "ok", seconds / 3, seconds * 2 / 3, *bytes_)
                )
        small = (1e-3, 1e-3, 4.0 * s, 8.0 * s, 8.0 * s)
        parts = ["embedding", "head", *(["prediction"] if num_predicting else [])]
        measurements += [Measurement("model", part, s, 1, "ok", *small) for part in parts]
    shape, hardware = DESCRIPTION.model, DESCRIPTION.hardware
    told = {"mtp_num_layers": num_predicting} if num_predicting else {}
    table = CostTable(
        dataclasses.replace(
            DESCRIPTION,
            date="2026-11-21",
            hardware=dataclasses.replace(hardware, kind=kind),
            model=dataclasses.replace(shape, num_layers=shape.num_layers + num_predicting),
            **told,
        ),
        tuple(measurements),
        Constants(
            static_bytes=static_bytes,
            optimizer_seconds=0.01,
            host_bytes_per_second=host_bytes_per_second,
        ),
    )
    write_cost_file(path, table, fit_table(table))
    return path


def with_seconds_scaled(table: CostTable, strategies: Collection[str], scale: float) -> CostTable:
    """The table with the seconds of some strategies, by their whole names, times scale."""
    points = (
        dataclasses.replace(
            m,
            forward_seconds=scale * m.forward_seconds,
            backward_seconds=scale * m.backward_seconds,
        )
        if m.strategy in strategies and m.is_timed
        else m
        for m in table.measurements
    )
    return dataclasses.replace(table, measurements=tuple(points))
