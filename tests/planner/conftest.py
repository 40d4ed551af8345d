"""The cost file of the tests of packed rows."""

from __future__ import annotations

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from tests.costs.synthetic import make_table
from tests.planner.row_policies import NAMES


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    table = make_table(strategies=NAMES)
    write_cost_file(path, table, fit_table(table))
    return read_cost_file(path)
