"""A cost file tells of which strategies' bytes it is, and who reads it tells where they changed."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.description import check_compatible
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.table import BYTE_QUANTITIES, LAYER_OPERATIONS, MLP
from megatron_paradyse.profiler.journal import Journal
from megatron_paradyse.strategies.accounting import operation_costs
from megatron_paradyse.strategies.sizes import HOLDINGS, LayerSizes
from tests.costs.synthetic import make_table
from tests.costs.telling import assert_commands_tell

# Of two layers: kept, in the forward, in the backward.
BYTES = {
    "megatron_ts": (1587200, 3622912, 4114432),
    "megatron_ts+recompute": (393216, 4816896, 5603328),
    "ulysses_z": (1750016, 2555904, 4190208),
    "ulysses_z+recompute": (393216, 3538944, 5547008),
    "megatron_cz": (1455104, 2871296, 4419584),
    "megatron_cz+recompute": (393216, 3960832, 5678080),
    "colossal_z": (4592640, 5865472, 8880128),
    "colossal_z+recompute": (393216, 9895936, 13079552),
    "metp": (598016, 2575360, 5736448),
    "metp+recompute": (393216, 2976768, 6137856),
}


def held(strategy: str) -> tuple[int, ...]:
    sizes = LayerSizes(s=512, b=1, h=256, n=8, g=2, d=32, f=512, p=4, causal=True, element_bytes=2)
    normed = dataclasses.replace(sizes, element_bytes=4, head_norm="rmsnorm")
    found = [
        operation_costs(strategy, operation, z)
        for z in (sizes, normed)
        for operation in LAYER_OPERATIONS[:2]
    ]
    return tuple(sum(getattr(costs, name) for costs in found) for name in BYTE_QUANTITIES)


def test_while_holdings_stays_strategies_hold_the_same():
    """Whoever changes what strategies hold: raise HOLDINGS, and then write new numbers; where a
    walk was wrong alone, only those.
    """
    assert HOLDINGS == 1
    assert {name: held(name) for name in BYTES} == BYTES


@pytest.mark.parametrize(("source", "again"), [("measured", "profile"), ("simulated", "simulate")])
def test_costs_of_strategies_that_held_other_bytes_are_told_of(tmp_path, source, again):
    path = tmp_path / "costs.json"
    table = make_table()
    run = dataclasses.replace(table.description, source=source)
    table = dataclasses.replace(table, description=run)
    write_cost_file(path, table, fit_table(table))
    assert read_cost_file(path).warnings() == Journal(path, run).warnings() == []
    values = json.loads(path.read_text())
    assert values["description"]["holdings"] == HOLDINGS
    for holdings in (None, HOLDINGS + 1):  # before files told, and of a later version
        del values["description"]["holdings"]
        values["description"] |= {} if holdings is None else {"holdings": holdings}
        path.write_text(json.dumps(values))
        told = f"the bytes in {path} are of strategies of another version of megatron_paradyse, "
        told += f"which may hold more or less than these: {again} again, into a new file"
        read = read_cost_file(path)
        assert read.warnings() == [told]
        assert check_compatible(read.table.description, run) == check_compatible(run, run)
        values["description"]["holdings"] = HOLDINGS
    assert_commands_tell(path, told)


def test_a_profile_that_goes_on_with_older_bytes_says_so_and_its_file_stays_one(tmp_path):
    path = tmp_path / "costs.json"
    table = make_table()
    older = dataclasses.replace(table.description, holdings=None)
    write_cost_file(path, dataclasses.replace(table, description=older))
    journal = Journal(path, table.description)
    assert "which may hold more or less than these" in journal.warnings()[0]
    journal.add(dataclasses.replace(table.measurements[0], operation=MLP, seq_length=3))
    journal.save()
    again = read_cost_file(path)
    assert again.table.description.holdings is None
    assert again.warnings() == journal.warnings()
