"""Layers that differ: which operations are whose, and in files."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.description import check_compatible
from megatron_paradyse.costs.layers import (
    ALIKE,
    LayerKinds,
    half_of,
    is_of_a_layer,
    kinds_of,
    layer_of,
    ranges_text,
)
from megatron_paradyse.costs.table import CostTable, Measurement
from megatron_paradyse.errors import UserError
from tests.costs.synthetic import CONSTANTS, DESCRIPTION

OTHERS = {"attention@2": (2, 4), "mlp@3": (3, 4)}
DIFFERING = dataclasses.replace(DESCRIPTION, other_layers=OTHERS)


def test_layers_have_one_operation_exactly_where_their_halves_are_equal():
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 12)
        attention, mlp = ([rng.choice("abc") for _ in range(count)] for _ in range(2))
        kinds = kinds_of(attention, mlp)
        assert kinds.operations(1) == ALIKE
        for i in range(count):
            for half, values in enumerate((attention, mlp)):
                own = kinds.operations(i + 1)[half]
                assert half_of(own) == ALIKE[half]
                assert layer_of(own) == values.index(values[i]) + 1
        assert sum(kinds.counts().values()) == count
        shares = {name: round(kinds.share(name) * count) for name in kinds.halves()}
        every = [name for n in range(1, count + 1) for name in kinds.operations(n)]
        assert shares == {name: every.count(name) for name in kinds.halves()}


def test_one_layer_of_each_kind_is_enough_to_measure_everything():
    kinds = LayerKinds(4, OTHERS)
    assert list(kinds.first_layers.values()) == [1, 2, 3, 4]
    assert kinds.counts() == dict.fromkeys(kinds.first_layers, 1)
    built = {name for number in kinds.first_layers.values() for name in kinds.operations(number)}
    assert built == set(kinds.halves())
    assert set(kinds.measured()) == built | {"layer", "layer@2", "layer@3", "layer@4"}
    assert LayerKinds(96).measured() == ("attention", "mlp", "layer")


@pytest.mark.parametrize(
    "others",
    [
        {"attention": (2,)},
        {"layer@2": (2,)},
        {"attention@1": (1, 2)},
        {"attention@2": ()},
        {"attention@2": (3, 4)},
        {"attention@2": (2, 2)},
        {"attention@2": (2, 5)},
        {"attention@2": (2, 3), "attention@3": (3,)},
        {"attention@02": (2,)},
    ],
)
def test_layers_that_contradict_each_other_are_refused(others):
    with pytest.raises(UserError, match="layers that differ: "):
        dataclasses.replace(DESCRIPTION, other_layers=others)


def test_names_of_operations():
    for name in ("attention", "mlp@2", "layer@96"):
        assert is_of_a_layer(name)
    for name in ("head", "attention@", "attention@1", "mlp@x", "mlp@-2", "mlp@2@3", "@2", "mlp@²"):
        assert not is_of_a_layer(name)
    assert ranges_text([1, 2, 3, 5, 7, 8]) == "1-3, 5, 7-8"


def test_a_file_tells_of_them_only_where_there_are_any(tmp_path):
    path = tmp_path / "costs.json"
    points = [Measurement("metp", name, 64, 1, "oom") for name in ("attention@2", "layer@3")]
    for description, measurements in ((DESCRIPTION, ()), (DIFFERING, points)):
        table = CostTable(description, tuple(measurements), CONSTANTS)
        write_cost_file(path, table)
        assert read_cost_file(path).table == table
        written = json.loads(path.read_text())["description"]
        assert ("other_layers" in written) == (description is DIFFERING)


@pytest.mark.parametrize(
    "value",
    [3, [2], {"attention@2": 2}, {"attention@2": ["2"]}, {"attention@2": [True]}, {"x@2": [2]}],
)
def test_nonsense_in_a_file_is_refused_in_one_line(value, tmp_path):
    path = tmp_path / "costs.json"
    write_cost_file(path, CostTable(DIFFERING, (), CONSTANTS))
    content = json.loads(path.read_text())
    content["description"]["other_layers"] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"other_layers|layers that differ") as caught:
        read_cost_file(path)
    assert "\n" not in str(caught.value)


def test_measurements_of_layers_that_are_not_told_of_are_refused():
    for name in ("attention@3", "layer@5"):
        with pytest.raises(UserError, match=f"{name} of metp .* tells of no such layer"):
            CostTable(DIFFERING, (Measurement("metp", name, 64, 1, "oom"),), CONSTANTS)


def test_costs_of_layers_that_differ_otherwise_are_refused():
    assert check_compatible(DIFFERING, DIFFERING)  # simulated, says the warning
    other = dataclasses.replace(DESCRIPTION, other_layers={"attention@2": (2, 3), "mlp@3": (3, 4)})
    with pytest.raises(UserError, match="layers with attention@2: 2, 4 in the file, 2-3 in the"):
        check_compatible(DIFFERING, other)
    with pytest.raises(UserError, match="layers with mlp@3: none in the file, 3-4 in the run"):
        check_compatible(DESCRIPTION, DIFFERING)
