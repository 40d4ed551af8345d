"""A cost file tells by which laws it was fitted, and who reads it tells where they are others."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fit_values import LAWS
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.model import HYBRID, PAPER
from megatron_paradyse.costs.table import BYTE_QUANTITIES, CostTable
from megatron_paradyse.errors import UserError
from tests.costs.synthetic import make_table
from tests.costs.telling import assert_commands_tell

STRATEGIES = ("megatron_ts", "metp", "metp+recompute", "ulysses_z")
PEAK = BYTE_QUANTITIES[-1]


def table() -> CostTable:
    """Noisy times, some longer at middle lengths, and attention within a window."""
    made = make_table(strategies=STRATEGIES, noise=0.03, steps=0.2, seed=5)
    halves = {"attention": {"window": 2000}, "mlp": {"experts": 0}}
    return dataclasses.replace(
        made, description=dataclasses.replace(made.description, halves=halves, head_tile="3000")
    )


def predicted(kind: str) -> list[tuple[float, float, float]]:
    """Seconds between lengths and beyond them, and a peak's bytes."""
    model = fit_table(table(), kind)
    return [
        (
            model.predict(strategy, operation, "time_seconds", 300),
            model.predict(strategy, operation, "time_seconds", 90_000),
            model.predict(strategy, operation, PEAK, 50_000),
        )
        for strategy, operation in (("metp", "attention"), ("ulysses_z", "mlp"), ("model", "head"))
    ]


NUMBERS = {
    HYBRID: (
        (0.0052406293, 1.4581374, 281665536.0),
        (0.0032353427, 0.18691791, 282648576.0),
        (0.0026757650, 0.19257242, 268865536.0),
    ),
    PAPER: (
        (0.0050160861, 1.9519888, 281665536.0),
        (0.0031550906, 0.37033749, 265736697.9),
        (0.0024870682, 0.18008441, 268865536.0),
    ),
}


def test_while_laws_stays_the_same_measurements_predict_the_same():
    """Whoever changes how models are fitted: raise LAWS, and then write new numbers."""
    assert LAWS == 4
    for kind, numbers in NUMBERS.items():
        for found, expected in zip(predicted(kind), numbers, strict=True):
            assert found == pytest.approx(expected, rel=1e-5), kind


def test_costs_that_other_laws_were_fitted_to_are_told_of(tmp_path):
    path = tmp_path / "costs.json"
    write_cost_file(path, table(), fit_table(table()))
    assert read_cost_file(path).warnings() == []
    values = json.loads(path.read_text())
    assert values["model"]["laws"] == LAWS
    for laws in (None, LAWS + 1):  # before files told, and of a later version
        del values["model"]["laws"]
        values["model"] |= {} if laws is None else {"laws": laws}
        path.write_text(json.dumps(values))
        told = f"another version of megatron_paradyse fitted {path}: this one predicts better "
        told += f"after megatron-paradyse fit {path} -o {path}"
        assert read_cost_file(path).warnings() == [told]
        values["model"]["laws"] = LAWS
    assert_commands_tell(path, told)
    values["model"]["laws"] = 0
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"model\.laws must lie in \[1, .*got 0"):
        read_cost_file(path)
    write_cost_file(path, table())
    assert read_cost_file(path).warnings() == []  # nothing was fitted
