"""The cost file that most tests of this folder ask."""

from __future__ import annotations

import pytest

from tests.train.synthetic_costs import write_costs


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    return str(write_costs(tmp_path_factory.mktemp("costs") / "costs.json"))
